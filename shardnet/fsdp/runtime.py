"""`Runtime`: what happens at each hook of a wrapped model.

    before_forward   gather the unit, show the full parameters, start gathering the next units
    after_forward    show the shards, free the full parameters or hold them, hook the outputs
    before_backward  gather the unit again, start gathering the next ones
    on_gradient      when the unit's last one is there: start the reduction
    after_backward   the unit's inputs have their gradients: free the full parameters
    end_backward     reduce what is left, wait for all reductions, set the parameters' gradients

[Note: recomputation] Activation checkpointing runs forward again within backward. Around a unit that is in its
backward the forward hooks do nothing, since its parameters are there. Other units are gathered and freed as in any
forward, but it is no new forward pass: nothing is learnt or prefetched.

[Note: what is held for backward] Backward begins where forward ends. So after forward the outermost unit, and as many
of the last units as fit into the prefetch window (empty by then), are held rather than freed: otherwise backward would
gather them again at once. With `keep` (SHARD_GRAD_OP, or chosen by `reshard_after_forward`) all units are held. A
forward without gradients holds none.

[Note: when a unit is freed in backward] A unit whose inputs carry gradients is freed when these are complete. Where
no input carries gradients, or where an input is also used elsewhere (a skip connection) and completes late, a unit
that has all its parameters' gradients is freed when the next unit's backward begins. Units that remain are freed at
the end. A unit cannot be freed as soon as its parameters have their gradients: backward may read frozen weights, and
a weight used through `detach()`, after the last gradient.
"""

import threading
from collections.abc import Sequence
from functools import partial
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.passes import BackwardPass, Call, ForwardPass, Wanted
from shardnet.fsdp.prefetch import Prefetcher
from shardnet.fsdp.reductions import ReductionQueue
from shardnet.fsdp.stepping import BackwardSteps
from shardnet.fsdp.tensors import differentiable, with_bases
from shardnet.fsdp.unit import Unit, UnitState
from shardnet.telemetry import Pass
from shardnet.uncompiled import uncompiled

_everyone = WeakSet["Runtime"]()  # of this process
_lock = threading.Lock()  # over it


def forget_graphs(backend: Backend) -> None:
    """Release the graphs of models on this backend, which will run no backward any more.

    A hook refers to its graph, and the graph holds the hook where Python's collector sees it only if nobody else uses this part of
    the graph: the collector would need one run for each unit, and until then parameters and activations would stay.
    """
    with _lock:
        runtimes = list(_everyone)
    for runtime in runtimes:
        if runtime.backend is backend:
            runtime.forget_graphs()


@uncompiled
class Runtime:
    """The units of one model at work; lives as long as the wrapped model. Used by one thread at a time."""

    def __init__(self, units: Sequence[Unit], comms: Communicators, prefetch: int, *, keep: bool = False) -> None:
        self.units = tuple(units)
        self.prefetcher = Prefetcher(self.units, prefetch, comms, keep=keep)
        self.synchronise = True  # reduce gradients in backward; off within `no_sync`
        self.backend = comms.backend
        self._comms = comms
        self._timeline = comms.timeline
        self._reductions = ReductionQueue(comms, limit=prefetch + 1)
        self._calls: list[Call] = []  # under way, outermost first
        self._caller: int | None = None  # the thread that has called the whole model
        self._traced = WeakSet[Call]()  # calls whose graphs still exist
        self._forward: ForwardPass | None = None  # the last one with gradients on
        self._backward: BackwardPass | None = None
        self._gathers_ahead = False  # start gathering at the end of a backward that has stepped
        self._unreduced: dict[Unit, None] = {}  # units with gradients of backwards that did not reduce them
        self.summoned = False  # every unit is in FORWARD, and stays so, whoever calls it
        for unit in self.units:
            for group in unit.groups:
                group.on_gradient(partial(self.on_gradient, unit), partial(self.on_gradient_from_elsewhere, unit))
        with _lock:
            _everyone.add(self)

    # --- forward

    def before_forward(self, unit: Unit, inputs: object, part: nn.Module | None = None) -> None:
        if self.summoned:
            if torch.is_grad_enabled():
                raise StateError(f"{unit.name}: summon_full_params() is for computing without gradients; train outside of it")
            return
        if self._backward is not None and not _in_backward():
            self.reset()  # the last backward raised: its end was never reached
        if self._caller is None and self._calls and self._calls[0].unit.state is not UnitState.FORWARD:
            self._calls.clear()  # of a forward of the inner module that was interrupted; `begin_call` has dealt with others
        if unit.state is UnitState.BACKWARD:
            return  # see [Note: recomputation]
        _refuse_transforms(unit)
        forward = self._calls[0].forward if self._calls else self._begin_forward()
        call = Call(unit, forward, threading.get_ident(), resumes=self._timeline.computing, part=part)
        self._calls.append(call)
        if len(self._calls) == 1 and not self._recomputing:
            self.prefetcher.consume_explicit()
        call.inner = unit.state is UnitState.FORWARD
        self._gather_for_forward(call)
        if torch.is_grad_enabled() and not call.inner and (tensors := differentiable(inputs)):
            call.hooks.append(register_multi_grad_hook(tensors, lambda _: self.after_backward(call), mode="all"))
            self._traced.add(call)

    def after_forward(self, unit: Unit, outputs: object) -> None:
        """Also runs when forward raised, then with None as `outputs`; and then perhaps without a `before_forward`."""
        if not self._calls or self._calls[-1].unit is not unit or unit.state is UnitState.BACKWARD:
            return
        call = self._calls.pop()
        tensors = differentiable(outputs) if torch.is_grad_enabled() else []
        if tensors:
            if not self._recomputing:
                call.forward.left(call)
            call.hooks.append(register_multi_grad_hook(with_bases(tensors), lambda _: self.before_backward(call), mode="any"))
            self._traced.add(call)
        written = None
        if unit.state is UnitState.FORWARD and all(outer.unit is not unit for outer in self._calls):
            written = unit.written()
            if tensors and self._worth_holding():
                unit.hold()
            else:
                unit.reshard(backward_follows=bool(tensors))
        self._timeline.compute(call.resumes)
        if not self._calls and not self._recomputing:
            self._end_forward(call.forward, completed=outputs is not None, backward_follows=bool(tensors))
        if written is not None and outputs is not None:
            raise lost_write(written, f"the forward of {unit.name}")

    def before_part(self, unit: Unit, part: nn.Module) -> bool:
        """Called before a module of the unit runs. Returns whether the module is called alone, while the unit is not at work: then call
        `before_forward` and `after_forward` around it, as for the unit."""
        if unit.state not in (UnitState.FORWARD, UnitState.BACKWARD):
            return True
        if self._calls and self._calls[-1].part is part:
            self._calls[-1].again += 1
        return False

    def after_part(self, part: nn.Module) -> bool:
        """Called after such a module has run. Returns whether this ends a call for which `before_part` was true."""
        if not self._calls or self._calls[-1].part is not part:
            return False
        self._calls[-1].again -= 1
        return self._calls[-1].again < 0

    def begin_call(self) -> int | None:
        """This thread calls the whole model. Returns what `end_call` must be given."""
        before, self._caller = self._caller, threading.get_ident()
        if before is None and self._calls and self._backward is None:
            self.reset()  # one of its parts was called, and interrupted
        return before

    def fail_call(self, error: BaseException) -> None:
        """The call has raised. Modules run no hooks for a BaseException that is no Exception, and none at all while torch compiles
        something on any thread."""
        if self._calls or not (isinstance(error, Exception) or self.summoned):
            self.reset()

    def end_call(self, before: int | None) -> None:
        self._caller = before

    @property
    def is_called(self) -> bool:
        """Whether a call of the model, of a unit or of a part is under way."""
        return self._caller is not None or bool(self._calls) or self._backward is not None

    def computes_here(self) -> bool:
        """Whether this thread is within a forward or backward of the model."""
        thread = threading.get_ident()
        if self._caller == thread or (self._backward is not None and self._backward.computes and _in_backward()):
            return True
        return any(call.thread == thread for call in self._calls) and self._calls[0].unit.state is UnitState.FORWARD

    def forget_graphs(self) -> None:
        """Remove the runtime's hooks from all graphs that still exist."""
        for call in list(self._traced):
            while call.hooks:
                call.hooks.pop().remove()

    @property
    def _recomputing(self) -> bool:
        return self._backward is not None

    def _begin_forward(self) -> ForwardPass:
        if self._backward is not None:
            return self._backward.forwards[-1]
        self._comms.shards.changed()
        self._release_kept()  # the backward never came, and the parameters may have changed since
        forward = ForwardPass()
        if torch.is_grad_enabled():
            self._forward = forward
        return forward

    def _end_forward(self, forward: ForwardPass, *, completed: bool, backward_follows: bool) -> None:
        if completed:
            self.prefetcher.learn(forward)
        self.prefetcher.stop()
        self._timeline.end_pass(Pass.FORWARD if completed else None)
        if not backward_follows:
            self._release_kept()

    def _gather_for_forward(self, call: Call) -> None:
        unit = call.unit
        if unit.state is not UnitState.FORWARD:  # it is, if the unit calls itself
            if self._recomputing:
                self.prefetcher.only(unit)
            else:
                self.prefetcher.in_forward(unit)
                unit.check_fresh()
            unit.use(UnitState.FORWARD)
        if not self._recomputing:
            call.forward.entered(unit, grad=torch.is_grad_enabled())
        self._timeline.compute(f"{unit.name} forward")

    def _worth_holding(self) -> bool:
        """See [Note: what is held for backward]; asked once a call has ended."""
        if self._recomputing:
            return all(unit.state is not UnitState.HELD for unit in self.units)
        return not self._calls or self.prefetcher.has_room

    def _release_kept(self) -> None:
        """Free what was kept for backward: held units and secondary shards."""
        for unit in self.units:
            if unit.state is UnitState.HELD:
                unit.reshard()
            unit.drop_secondary()

    # --- backward

    def before_backward(self, call: Call) -> None:
        self._refuse_summoned("backward()")
        if torch.is_grad_enabled():
            raise StateError(f"{call.unit.name}: backward(create_graph=True) is not supported, since it reads parameters that were freed")
        backward = self._enter_backward(call.forward)
        backward.computes = True
        self._owe(backward, [call.unit])  # adds the unit only if it first ran within a reentrant checkpoint
        for finished in backward.take_finished(call.unit):
            finished.reshard()
        backward.opened(call)
        if backward.advances(call):
            self.prefetcher.in_backward(call)
        else:
            self.prefetcher.only(call.unit)
        if call.unit.state is not UnitState.BACKWARD:
            call.unit.use(UnitState.BACKWARD)
        self._timeline.compute(f"{call.unit.name} backward")

    def on_gradient(self, unit: Unit, group: FlatGroup, index: int) -> None:
        backward = self._backward or self._enter_backward(self._forward or ForwardPass())
        backward.computes = True
        self._reductions.advance()
        self._arrive(backward, unit, (group, index, False))

    def on_gradient_from_elsewhere(self, unit: Unit, group: FlatGroup, index: int) -> None:
        """See [Note: gradients from elsewhere] in elsewhere.py."""
        forward = self._forward if self._forward is not None and not self._forward.reduced else ForwardPass()
        backward = self._backward or self._enter_backward(forward)
        self._owe(backward, [unit])
        self._arrive(backward, unit, (group, index, True))

    def _arrive(self, backward: BackwardPass, unit: Unit, gradient: Wanted) -> None:
        if backward.arrived(unit, gradient):
            if not unit.frozen_in_part:
                backward.finished.append(unit)
            if self.synchronise:
                self._reductions.ready(unit)

    def after_backward(self, call: Call) -> None:
        backward, unit = self._backward, call.unit
        if backward is None:
            return
        through = backward.closed(call)
        if unit.state is not UnitState.BACKWARD:
            return
        if self.synchronise and backward.received and not any(_will_arrive(*gradient) for gradient in backward.missing(unit)):
            self._reductions.ready(unit)  # the missing gradients will not come in this backward
        if through and not call.forward.repeats(call):
            unit.reshard()

    def end_backward(self) -> None:
        backward = self._backward
        if backward is None:
            return
        try:
            if not backward.received:
                self._reductions.cancel_plan()
            elif self.synchronise:
                for unit in backward.units:
                    self._unreduced.pop(unit, None)  # planned when backward came to the unit, with the gradients that no_sync left in it
                self._reduce(backward.forwards)
            else:
                for unit in backward.units:
                    unit.keep_gradients()
                self._unreduced.update(backward.units)
            self._backward = None
            self._free_all()
            if backward.received and self.synchronise:
                self._end_steps()
        except BaseException:
            self.reset()
            raise
        self._timeline.end_pass(Pass.BACKWARD if backward.received else None)

    def _end_steps(self) -> None:
        """With steps in backward: take the last steps, and start gathering for the next forward, so that this overlaps with whatever the
        program does in between."""
        if self._reductions.steps is not None:
            self._reductions.steps.end()
            if self._gathers_ahead and not self.prefetcher.explicit_pending:
                self.prefetcher.start_explicit()

    def _enter_backward(self, forward: ForwardPass) -> BackwardPass:
        if self._backward is None:
            self._backward = BackwardPass()
            Variable._execution_engine.queue_callback(self.end_backward)
        if forward not in self._backward.forwards:
            self._backward.forwards.append(forward)
            if self._reductions.steps is not None:
                self._reductions.steps.postpone(group for unit in forward.repeated for group in unit.groups)
            self._owe(self._backward, list(reversed(forward.tracked)))
        return self._backward

    def _owe(self, backward: BackwardPass, units: list[Unit]) -> None:
        new = backward.owe(units)
        if self.synchronise:
            self._reductions.plan(new)

    # --- reduction

    def synchronise_gradients(self) -> None:
        """Reduce what no backward has reduced: gradients of `no_sync`, and zeros for what got none. A collective."""
        if self._forward is None:
            raise StateError("there is nothing to synchronise. Was forward() called before backward()?")
        if self._backward is not None:
            self.reset()
        if not self._forward.reduced:
            self._reductions.plan(reversed(self._forward.tracked))
        self._reduce([self._forward])
        self._end_steps()

    def _reduce(self, forwards: Sequence[ForwardPass]) -> None:
        self._reductions.plan(self._unreduced)
        self._reductions.finish()
        # A unit used twice under reentrant checkpoints is complete twice.
        self._reductions.plan(unit for unit in reversed(self.units) if any(not group.gradients.empty for group in unit.groups))
        self._reductions.finish()
        self._unreduced.clear()
        for forward in forwards:
            forward.reduced = True

    @property
    def unreduced(self) -> bool:
        """Whether gradients wait for a reduction."""
        return bool(self._unreduced)

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for a reduction. Call it between passes."""
        if self._backward is not None and not _in_backward():
            self.reset()  # the last one has raised
        for unit in self._unreduced:
            unit.drop_gradients()
        self._unreduced.clear()

    def step_in_backward(self, steps: BackwardSteps | None, *, gathers_ahead: bool) -> None:
        """Take these steps from the next backward on; None: none any more. With `gathers_ahead` the next forward's first units are gathered
        after the steps."""
        if self._backward is not None or self._unreduced:
            raise StateError(
                "step_in_backward() was called within a step: a backward is under way, or gradients of no_sync() are not reduced; call it "
                "between steps"
            )
        self._reductions.steps, self._gathers_ahead = steps, gathers_ahead

    @property
    def steps(self) -> BackwardSteps | None:
        """Those of `step_in_backward`."""
        return self._reductions.steps

    # --- everything whole, and nothing

    def summon(self) -> None:
        """Gather every unit, until `dismiss`. A collective. Raises StateError within a forward or backward."""
        if self._caller is not None or _in_backward():
            raise StateError("summon_full_params() was called within a forward or backward; call it before or after")
        if self._calls or self._backward is not None:
            self.reset()  # of one that was interrupted
        try:
            self.prefetcher.gather_all()
            for unit in self.units:
                unit.use(UnitState.FORWARD)
                for group in unit.groups:
                    group.freeze_leaves()
        except BaseException:
            self.prefetcher.reset()
            self._free_all()
            raise
        self.prefetcher.reset()
        self.summoned = True

    def dismiss(self) -> StateError | None:
        """Shard everything that `summon` has gathered. Returns the error to raise if somebody has written to it. The memory goes
        back to the system, since a step needs less."""
        if not self.summoned:
            return None
        self.summoned = False
        written = [name for name in [unit.written() for unit in self.units] if name is not None]
        for unit in self.units:
            unit.reshard(keep_memory=False)
        return lost_write(written[0], "summon_full_params()") if written else None

    def require_slices(self, purpose: str) -> None:
        """Call this before using parameters as this rank's slices. After an interrupted call of the inner module they may still be whole:
        then shard them.

        Raises StateError within `summon_full_params`, where they are meant to be whole.
        """
        self._refuse_summoned(purpose)
        if self._caller is None and any(call.thread == threading.get_ident() for call in self._calls):
            self.reset()

    def _refuse_summoned(self, purpose: str) -> None:
        if self.summoned:
            raise StateError(f"{purpose} cannot be called within summon_full_params(), where parameters are whole: leave it first")

    # --- the end

    def reset(self) -> None:
        """After an error: wait for what is under way, drop the iteration's gradients, and shard everything."""
        self.summoned = False
        self._calls.clear()
        self._backward = None
        self._reductions.abandon()
        self._unreduced.clear()
        self.prefetcher.reset()
        for unit in self.units:
            unit.drop_gradients()
        self._free_all()
        self._timeline.end_pass(None)

    def _free_all(self) -> None:
        """Bring every unit back to SHARDED, except those of an explicit prefetch."""
        self.prefetcher.stop()
        for unit in self.units:
            if unit.state not in (UnitState.SHARDED, UnitState.GATHERING):
                unit.reshard()
            unit.drop_secondary()
        self._timeline.compute(None)


def lost_write(name: str, where: str) -> StateError:
    """See [Note: writes that would be lost] in group.py."""
    return StateError(
        f"{name} was written to within {where}, where the whole parameter exists only for a moment, so the new values are lost: write to "
        "this rank's slices (model.parameters()) after the optimizer's step (docs/scripts.md), or choose NO_SHARD"
    )


def _refuse_transforms(unit: Unit) -> None:
    """Raise StateError inside a transform that calls a forward with stand-ins for tensors: the stand-ins would reach the collectives."""
    within = torch._C._functorch.peek_interpreter_stack() is not None
    if within and unit.trainable and (torch.is_grad_enabled() or not unit.is_known_to_autograd):
        raise StateError(
            f"{unit.name} is called by a transform of torch.func (vmap, grad, jvp, ...), which does not work with a sharded forward: call "
            "the model with a batch, and use .backward() or torch.autograd.functional; vmap works within summon_full_params()"
        )
    if torch._C._get_tracing_state() is not None:
        raise StateError(
            f"{unit.name} is being traced by torch.jit, which does not work with a sharded forward: trace the module that unwrap() "
            "returns, or an unsharded copy in one process"
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _will_arrive(group: FlatGroup, index: int, from_elsewhere: bool) -> bool:
    """Whether the backward that runs now will bring this gradient."""
    if from_elsewhere:
        return group.elsewhere.expects(index)
    return torch._C._will_engine_execute_node(get_gradient_edge(group.leaves[index]).node)
