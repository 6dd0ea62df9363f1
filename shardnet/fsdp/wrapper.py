"""`FSDP`: the module wrapper that users see."""

import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from shardnet import process
from shardnet.backend import Backend, Pending
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import offload, state
from shardnet.fsdp.absent import unwatch_parameters, watch_parameters
from shardnet.fsdp.alike import check_alike, describe_model
from shardnet.fsdp.arguments import check_kinds, check_parameters
from shardnet.fsdp.clipping import global_norm, scale_to_norm
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.group import FlatGroup, sharded_by
from shardnet.fsdp.hooks import attach, attach_to_parts
from shardnet.fsdp.ignored import IgnoredModules
from shardnet.fsdp.initial import copy_buffers_from_root, shard_from_root
from shardnet.fsdp.known import KnownParameters
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.meta.initial_values import InitFunction, InitialValues
from shardnet.fsdp.meta.model import MetaModel, is_on_meta
from shardnet.fsdp.optimizers import check_optimizer
from shardnet.fsdp.placement import UnitChoice, parts_of, plan_units
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.precision import MixedPrecision
from shardnet.fsdp.resharding import Resharding
from shardnet.fsdp.runtime import Runtime
from shardnet.fsdp.stepping import BackwardSteps
from shardnet.fsdp.uneven import UnevenSteps, count_samples
from shardnet.fsdp.unit import Unit
from shardnet.sharding import ShardingStrategy, sharding_ranks
from shardnet.uncompiled import uncompiled

T = TypeVar("T")
Tensor = torch.Tensor


@uncompiled
class FSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are spread over the ranks of a backend.

    `units` names the submodules that are gathered and freed one by one: module classes, or a predicate
    `(name, module) -> bool`; the module must contain at least one of the classes. Parameters in none of them belong to
    the root unit, which stays gathered during the whole forward.
    `strategy` says what is spread over which ranks (`ShardingStrategy`); with HYBRID_SHARD a node has `intra_node_size`
    ranks, and if that is left out the nodes are those that the rendezvous found. `prefetch` is how many units are gathered
    ahead of the one that computes, in forward and backward; with 0 nothing overlaps, and each additional unit costs the
    memory of one unit. `mixed_precision` names the dtypes to compute and to reduce in; the sharded parameters keep their own.
    `reshard_after_forward` says what happens to a unit's full parameters after its forward: True frees them (FULL_SHARD and
    HYBRID_SHARD), False keeps them for backward (SHARD_GRAD_OP), and a number of ranks, such as the size of a node, spreads
    them over that many neighbours, from which backward gathers them again. None leaves it to the strategy. `compression` says
    what is sent in fewer bits than it is computed in.
    `ignored_modules` are submodules that stay whole and each rank's own, buffers included (torch's FSDP broadcasts those): FSDP
    neither broadcasts them nor reduces their gradients, so freeze them, or reduce their gradients yourself before clipping.
    State dicts hold them as they are on the rank; `clip_grad_norm_` counts them once.

    With `cpu_offload` this rank's parameters, gradients and optimizer state are in the CPU's memory, where the optimizer steps, and
    units are gathered on `device`, a GPU; if it is left out, on the GPU that the module is on, or otherwise on the current one. So
    the GPU holds the units that compute, their gradients and activations. The module may be on the CPU before; its buffers are
    moved to the GPU, and ignored modules stay where they are.

    A module that was built under `torch.device("meta")` is materialised on `device` (the CPU if left out) unit by unit: besides
    its shards a rank holds only the units around one module at a time. Each module fills its own tensors in
    `reset_parameters()`, or `param_init_fn(module)` does, called for every module, inner ones first
    ([Note: order of initialisation] in meta/model.py says when that gives the numbers of a module built with memory).
    Alternatively rank 0's `initial_state` has the parameters and buffers: a mapping from names to whole tensors, such as a
    lazily read file; each tensor is read once, when its turn comes. The other ranks' `initial_state` is not read and may be {}.
    The functions are then called only for modules with buffers that no state dict holds. For a module with memory
    `param_init_fn` is not called.

    Making an FSDP is a collective: rank 0's parameters and buffers reach every rank, and afterwards each parameter,
    still the same object, is 1-D and holds this rank's slice, possibly empty. Optimizers may be made before or after.
    Raises CollectiveMismatch on all ranks if one is given another model, or other values of the arguments that decide
    what is sent. Afterwards every rank must do the same: run the same units in the same order, and make the same calls
    of the methods marked as collectives. A training loop stays as it was: `loss = model(x)`, `loss.backward()`,
    `optimizer.step()`; gradients are the mean over ranks. A parameter that no rank used gets zeros as its gradient,
    where one process would leave None: an optimizer still decays it, or moves it by its momentum, unless it is frozen.
    Buffers are not sharded and, after the first broadcast, each rank's own.

    Used by one thread at a time. It does not own the backend.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        units: UnitChoice = None,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        prefetch: int = 1,
        mixed_precision: MixedPrecision | None = None,
        reshard_after_forward: bool | int | None = None,
        compression: Compression | None = None,
        ignored_modules: Iterable[nn.Module] = (),
        param_init_fn: InitFunction | None = None,
        initial_state: Mapping[str, Tensor] | None = None,
        device: torch.device | str | None = None,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__()
        check_kinds(module, backend, prefetch, mixed_precision, compression)
        if intra_node_size is not None and strategy != ShardingStrategy.HYBRID_SHARD:
            raise UsageError(
                f"intra_node_size is for HYBRID_SHARD only, got strategy {ShardingStrategy(strategy).name}; leave intra_node_size out"
            )
        if any(isinstance(inner, FSDP) for inner in module.modules()):
            raise UsageError(
                "the module contains an FSDP module already; wrap only the outermost module, and choose its parts with `units`"
            )
        self.module = module
        self.strategy = ShardingStrategy(strategy)
        self.memory = MemoryMeter()
        ignored = IgnoredModules(module, ignored_modules)
        check_parameters(module, ignored)
        compute_device = offload.compute_device(module, device) if cpu_offload else None
        meta: MetaModel | None = None
        if is_on_meta(module, ignored):
            values = InitialValues(param_init_fn, initial_state, backend.rank)
            meta = MetaModel(module, ignored, values, torch.device(compute_device or device or "cpu"))
        elif initial_state is not None or (device is not None and not cpu_offload):
            raise UsageError(
                "initial_state and device are for a module on meta, and this module has memory: call load_state_dict() or .to() on it "
                "before you shard it"
            )
        ranks = sharding_ranks(self.strategy, backend.rank, backend.world_size, backend.node_ranks, intra_node_size)
        resharding = Resharding.chosen(reshard_after_forward, self.strategy, len(ranks.shards))
        precision = mixed_precision or MixedPrecision()
        compression = (compression or Compression()).chosen(self.strategy, len(ranks.shards), precision)
        # Before the sub-groups: where only one rank is refused here, its later sub-groups would not have the same numbers as the others'.
        plans = plan_units(module, units, ignored)
        self._comms = Communicators(backend, ranks, resharding.neighbours, packs_gradients=compression.gradients is not None)
        choice = [f"strategy {self.strategy.name}", f"{len(ranks.shards)} ranks that share a copy", f"after forward: {resharding}"]
        lines = [*choice, *describe_model(plans, module, ignored, precision, compression)]
        check_alike(lines, self._comms, "the models to shard", "give the same model and the same arguments on all ranks")
        pool = BufferPool(self.memory)
        self.units = tuple(Unit(plan, precision, compression, self._comms, self.memory, pool, compute_device) for plan in plans)
        if compute_device is not None:
            offload.move_buffers(module, ignored, compute_device)
        if meta is None:
            shard_from_root(self.groups, self._comms)
        else:
            meta.materialise(self.units, self._comms, self.memory, pool)
        copy_buffers_from_root(module, self._comms, ignored)
        process.return_freed_memory()  # the whole model's, which leaves gaps that a step could not use
        self._runtime = Runtime(self.units, self._comms, prefetch, keep=resharding.keep)
        self._known = KnownParameters(module, self.groups, ignored)
        self._hooks = [
            handle for unit in self.units for handle in attach(unit, self._runtime, precision, self._known, outermost=unit.module is module)
        ]
        if plans[0].parameters:
            self._hooks += attach_to_parts(self.units[0], parts_of(plans[0], plans), self._runtime, precision, self._known)
        watch_parameters(module, self.groups, self._runtime.computes_here)
        self._hooks += [
            module.register_state_dict_pre_hook(state.refuse_slices),  # type: ignore[no-untyped-call]  # torch has no annotation for it
            module.register_load_state_dict_pre_hook(state.refuse_wholes),  # type: ignore[no-untyped-call]  # nor for this
        ]

    @property
    def backend(self) -> Backend:
        return self._comms.backend

    @property
    def groups(self) -> list[FlatGroup]:
        """The flat groups of all units, in registration order."""
        return [group for unit in self.units for group in unit.groups]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's forward. A collective. If it raises, everything is back at shard size.

        Raises StateError for a module that has other parameters than it was sharded with, and for one that was unwrapped.
        """
        if not self._hooks:
            raise StateError("this FSDP was unwrapped: call the module that unwrap() returned, which has whole parameters again")
        if not self._runtime.summoned:
            self._known.check()
        before = self._runtime.begin_call()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._runtime.fail_call(error)
            raise
        finally:
            self._runtime.end_call(before)

    # --- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context backward only adds up gradients on this rank, in full size; the next backward outside, or
        `sync_gradients`, reduces the sum. Enter and leave it on all ranks alike. Only the model's own `zero_grad` drops these
        gradients, an optimizer's does not."""
        before, self._runtime.synchronise = self._runtime.synchronise, False
        try:
            yield
        finally:
            self._runtime.synchronise = before

    def uneven(
        self,
        batches: Iterable[T] | AsyncIterable[T],
        *,
        samples: Callable[[T], int] = count_samples,
        accumulate: int = 1,
        dummy: T | None = None,
    ) -> UnevenSteps[T]:
        """Go through batches of unequal size and number, so that gradients are the mean over all ranks' samples.

            for part in model.uneven(batches):
                loss = part.weight * F.cross_entropy(model(part.batch.x), part.batch.y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        Ends on all ranks together, when the last one is out of batches; until then a rank without batches computes its last
        one again with weight 0 ([Note: joining with zeros]). The model's buffers, such as those of batch normalisation, see
        that batch again. `samples(batch)` counts what the loss is the mean of, such as tokens that are not masked; by default
        it is the length of the first tensor. `dummy` is for ranks that may have no samples at the beginning: any batch that
        the model accepts. With `accumulate` a step has that many batches of a rank: use `no_sync()` for every part but the
        `last`.

        Iterating is a collective: leave the loop on all ranks alike. Reads one step ahead. Raises StateError on all ranks if one
        has nothing to compute on.
        """
        return UnevenSteps(batches, self._comms, samples=samples, accumulate=accumulate, dummy=dummy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those that `no_sync` has added up, which an optimizer's `zero_grad` does not know."""
        self._runtime.drop_unreduced()
        super().zero_grad(set_to_none)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if `optimizer.step()` would be wrong now: UsageError for an optimizer that does not work with sharded parameters. If it
        has parameters of this model: StateError while gradients of `no_sync` are not reduced, and, with `step_in_backward`, UsageError for
        an optimizer that was not given to that. `AsyncFSDP.step` calls this."""
        check_optimizer(optimizer)
        if not self._runtime.unreduced and self._runtime.steps is None:
            return
        own = {id(parameter) for group in self.groups for parameter in group.originals}
        if not any(id(parameter) in own for options in optimizer.param_groups for parameter in options["params"]):
            return
        if self._runtime.unreduced:
            raise StateError(
                "gradients of no_sync() are not reduced yet, so the optimizer has none to step with: run the last backward of a step "
                "outside no_sync(), or call sync_gradients() before the optimizer steps"
            )
        if self._runtime.steps is not None and not self._runtime.steps.has(optimizer):
            raise UsageError(
                "backward steps the optimizers given to step_in_backward(), and this optimizer is not among them: give all of the model's "
                "optimizers to step_in_backward() in one call"
            )

    def sync_gradients(self) -> None:
        """Reduce gradients that no backward has reduced; a missing one counts as zeros. Always the mean. A collective.

        Nothing is left to do after a normal backward. Raises StateError before the first forward.
        """
        self._runtime.require_slices("sync_gradients()")
        self._runtime.synchronise_gradients()

    def step_in_backward(self, *optimizers: torch.optim.Optimizer) -> None:
        """From now on backward steps these optimizers itself, each unit as soon as its gradients are reduced, while backward still
        computes the units before it; then it starts gathering what the next forward needs first. Called without optimizers, it switches
        this off.

            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model.step_in_backward(optimizer)
            for batch in batches:
                model(batch).mean().backward()  # and step

        A rank then holds reduced gradients of one unit rather than of all. `optimizer.step()` and `zero_grad()` may stay in the loop:
        they find nothing to do. Learning rates may change between backwards. Each backward outside `no_sync()` is a step, so a
        graph that is kept for a second backward would meet changed parameters. The optimizers must treat each parameter separately,
        as all do that work with sharded parameters; give all of the model's optimizers.

        No gradients are left for methods that need all of them at once: `clip_grad_norm_` raises StateError, and a GradScaler has
        nothing to unscale. A backward that raises may have stepped some units. Call this on all ranks alike; it is not a collective.
        Raises UsageError for optimizers of other parameters or of parameters that have gradients, or if a parameter is in no
        optimizer, and StateError in the middle of a step.
        """
        self._runtime.require_slices("step_in_backward()")
        steps = BackwardSteps(optimizers, self.groups, self._comms.timeline) if optimizers else None
        self._runtime.step_in_backward(steps, gathers_ahead=self._comms.shard_count > 1)

    @property
    def steps_in_backward(self) -> bool:
        """Whether `step_in_backward` is on."""
        return self._runtime.steps is not None

    @property
    def is_stepping_in_backward(self) -> bool:
        """Whether an optimizer steps within backward at this moment."""
        return self._runtime.steps is not None and self._runtime.steps.under_way

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all ranks, and return that norm: 0-dim float64, equal on all ranks.
        A collective. `torch.nn.utils.clip_grad_norm_` would take each rank's slices for the whole."""
        self._runtime.require_slices("clip_grad_norm_()")
        if self.steps_in_backward:
            raise StateError(
                "clipping needs all gradients at once, but step_in_backward() has used and dropped them, unit by unit: use only one of them"
            )
        if self._runtime.unreduced:
            raise StateError("gradients of no_sync() are not reduced yet; call sync_gradients() before clipping")
        sharded = [parameter.grad for parameter in self._sharded_parameters() if parameter.grad is not None]
        ignored = [parameter.grad for parameter in self._ignored_parameters() if parameter.grad is not None]
        device = next((group.shard.device for group in self.groups), torch.device("cpu"))
        with torch.no_grad():
            counted = sharded + ignored if self._comms.shard_rank == 0 else sharded  # the ignored ones are whole on every rank
            total = global_norm(counted, norm_type, device, self._comms)
            scale_to_norm(sharded + ignored, total, max_norm)
        return total

    # --- explicit control of parameters

    def prefetch_forward_params(self) -> list[Pending[None]]:
        """Start gathering what the next forward needs first, and return at once. A collective.

        Awaiting the handles is optional: forward waits for them. Parameters may be changed in between; no change is lost. With
        `step_in_backward` the end of backward has already started this. Raises StateError if an earlier prefetch has not been used
        yet, and UsageError for a strategy that has nothing to prefetch because full parameters are there already.
        """
        self._runtime.require_slices("prefetch_forward_params()")
        if not self.strategy.frees_after_forward:
            raise UsageError(f"prefetch_forward_params is for FULL_SHARD and HYBRID_SHARD; this model has {self.strategy.name}")
        if self.steps_in_backward and self.has_pending_prefetch:
            return self._runtime.prefetcher.explicit_handles
        return self._runtime.prefetcher.start_explicit()

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a prefetch waits for its forward."""
        return self._runtime.prefetcher.explicit_pending

    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's slices, given end to end in the order of `parameters()` without ignored ones; no traffic."""
        self._runtime.require_slices("update_shards()")
        held = self._sharded_parameters()
        total = sum(parameter.numel() for parameter in held)
        if flat.numel() != total:
            raise UsageError(f"FSDP update_shards: expected {total} elements but got {flat.numel()}")
        with torch.no_grad():
            for parameter, piece in zip(held, torch.split(flat.reshape(-1), [parameter.numel() for parameter in held]), strict=True):
                parameter.copy_(piece)

    def broadcast_updated_params(self) -> None:
        """SHARD_GRAD_OP: gather every parameter as it is now, and wait; the next forward finds it there. A collective.

        Optional, since forward gathers what is not there. For the other strategies there is nothing to do.
        """
        self._runtime.require_slices("broadcast_updated_params()")
        if self.strategy is ShardingStrategy.SHARD_GRAD_OP:
            self._runtime.prefetcher.gather_all()

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Within this context the modules hold whole parameters, so each rank may call any part of the model, as often as it likes:

            with model.summon_full_params():
                text = model.module.generate(prompt)

        Entering it is a collective; computing within it is not, and makes no gradients (`torch.no_grad()`). The parameters are those that
        forward computes with, in its dtype, and must only be read: writes to them are lost, except where a rank has all of them anyway. A
        lost write raises StateError at the end if it can be detected; a write through `.data` cannot. A node needs memory for the whole
        model; where the ranks of a node share no memory, each rank does. A rank that leaves first waits for the others in its next
        collective, for as long as a collective may take (`Timeouts.collective_s`).

        Nesting it changes nothing. Raises StateError within a forward or backward. Within it, all methods that work on
        slices in place, such as `clip_grad_norm_` or `load_sharded_state_dict`, raise StateError, and so do calls of the model with
        gradients on. With an `AsyncFSDP`, use it in a function given to `run`.
        """
        if self._runtime.summoned:
            yield
            return
        self._runtime.summon()
        try:
            with torch.no_grad():
                yield
        finally:
            lost = self._runtime.dismiss()
        if lost is not None:
            raise lost

    def settle(self) -> None:
        """Wait for whatever is under way, whether it succeeds or fails, and shard everything, as before the first forward. For a
        program that ends in the middle of an iteration; the gradients of that iteration are lost."""
        self._runtime.reset()

    def unwrap(self) -> nn.Module:
        """Return the inner module with whole parameters, the same objects, and without hooks. A collective, and the end
        of this wrapper."""
        self._runtime.reset()
        unwatch_parameters(self.module)
        for group in self.groups:
            with group.gathered("unwrap") as flat:
                group.release(flat)
        while self._hooks:
            self._hooks.pop().remove()
        return self.module

    # --- state

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Whole parameters and buffers under the inner module's names, gathered unit by unit. A collective.

        With `rank0_only` the other ranks keep nothing and get {}. Raises StateError for a module that has other parameters by now.
        """
        self._known.check()
        return state.full_state(self.module, self.groups, keep=not rank0_only or self.backend.rank == 0)

    def sharded_state_dict(self) -> state.ShardedState:
        """This rank's slices and where they belong in the whole parameters; no traffic. Raises StateError as `full_state_dict` does."""
        self._known.check()
        return state.sharded_state(self.module, self.groups, self._comms.shard_rank)

    def load_full_state_dict(self, full: state.FullState, *, strict: bool = True) -> Any:
        """Load whole parameters, from `full_state_dict` of any world size or from an unwrapped module; no traffic.

        Every rank must be given the same: a mapping, or pairs of name and tensor. Both are read one tensor at a time, and
        the slices are kept until all are there: at the peak a rank has its shards twice and one whole tensor. What hooks of modules must
        change before it is a parameter, such as the parts of one that they join, stays whole until then.
        """
        self._runtime.require_slices("load_full_state_dict()")
        return state.load_full_state(self.module, self.groups, self._comms.shard_rank, full, strict=strict)

    def load_sharded_state_dict(self, sharded: state.ShardedState) -> None:
        """Load what `sharded_state_dict` returned on the same rank, in a world of the same size; no traffic."""
        self._runtime.require_slices("load_sharded_state_dict()")
        state.load_sharded_state(self.module, self.groups, self._comms.shard_rank, sharded)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The same as `full_state_dict()`; a collective."""
        return self.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The same as `load_full_state_dict`, with torch's names. Raises UsageError for `assign`."""
        if assign:
            raise UsageError(
                "load_state_dict(..., assign=True) is not possible for a sharded model, which keeps its slices and copies into them: leave "
                "assign out, or load before you shard"
            )
        return self.load_full_state_dict(state_dict, strict=strict)

    # --- nn.Module, with the names of the inner module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's slices, and ignored parameters whole, under the inner module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the inner module's names."""
        return self.module.named_buffers(*args, **kwargs)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of that name in `named_parameters()`: this rank's slice, or an ignored one whole."""
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of that name in `named_buffers()`."""
        return self.module.get_buffer(target)

    def _sharded_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if sharded_by(parameter) is not None]

    def _ignored_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if sharded_by(parameter) is None]

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(inner, name):
                raise
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise StateError(
                "get_state_dict() and the functions beside it do not know a sharded model, of which each rank holds only slices: save its "
                "full_state_dict() with torch.distributed.checkpoint, or model and optimizer with shardnet.checkpoint"
            )
        kind = type(inner).__name__
        raise AttributeError(
            f"FSDP has no attribute {name!r}, but its {kind} has: use model.module.{name}; if it computes, call it on all ranks, or within "
            "summon_full_params()"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError("a sharded model cannot be copied or pickled, since other ranks hold parts of it; use its full_state_dict()")

    def _apply(self, *args: Any, **kwargs: Any) -> "FSDP":
        raise StateError("a sharded model cannot be moved or converted: call .to(), .half() and the like before wrapping it")
