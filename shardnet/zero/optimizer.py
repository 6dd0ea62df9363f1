"""`ZeroOptimizer`: any torch optimizer, with its state spread over ranks (ZeRO-1)."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.config import MIB
from shardnet.errors import StateError, UsageError
from shardnet.fsdp.alike import check_alike
from shardnet.fsdp.clipping import global_norm, scale_to_norm
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.initial import ROOT
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import UnitChoice
from shardnet.sharding import ShardingStrategy, sharding_ranks
from shardnet.sharding.overlap import refuse_overlaps
from shardnet.uncompiled import uncompiled
from shardnet.zero import reduction
from shardnet.zero.agreement import agree_on_step, describe
from shardnet.zero.bucket import Owned
from shardnet.zero.bucketing import Units
from shardnet.zero.exchange import consolidate
from shardnet.zero.gathers import Gathers, wait_before_use
from shardnet.zero.parameters import ShardedParameters, check_parameters
from shardnet.zero.split import OptimizerClass, Split, choose_split, defaults_of
from shardnet.zero.state import SHARD_KEY, Shard, cut

Tensor = torch.Tensor
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@uncompiled
class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state is spread over the ranks of a backend, for a module that every rank holds whole.

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, backend, module=model, units=[Block], lr=1e-3)

    Every rank computes gradients on its part of the batch. `step` averages the gradients so that each rank gets the mean
    of its own slice, steps that slice, and gathers the new parameters. A rank holds the state of its slice only: 1/N
    (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020). The
    result is that of the optimizer in one process on the combined batch.

    `params` are parameters, named parameters or groups with options of their own, and `options` are those of
    `optimizer_class`. A ZeroOptimizer is a `torch.optim.Optimizer` itself: schedulers, closures and hooks work,
    `param_groups` holds the whole parameters and may be edited between steps, and `state` holds this rank's part of the
    state.

    With `module` the gathers overlap with the next forward: a unit's forward waits for the unit's parameters, and so does
    whoever takes them from the module (`module.parameters()`, `module.head.weight`, `copy.deepcopy(module)`); `state_dict`
    calls wait for all. `units` names the units as for FSDP; without it the module is the only unit. If you have kept a
    parameter from before, call `wait` after `step` before you read or change it. Without `module`, `step` waits.

    `step` averages the gradients; within `last_backward` they are averaged while backward still computes others.

    `reduce_gradients=False` says that gradients are already averaged when `step` is called, and equal on all ranks. For
    float16, step through `shardnet.fsdp.GradScaler`. `torch.amp.GradScaler` lets each rank decide by its own gradients
    whether to step at all; it is refused with UsageError.
    `bucket_bytes` bounds the parts in which gradients are packed and parameters gathered, for each dtype of a unit.

    Optimizers that treat each element separately, such as SGD, Adam and most of torch's, are split evenly by elements;
    all others by whole parameters, which is exact for those that look at one parameter at a time. LBFGS is refused.
    `split` overrides the choice: see [Note: which split is exact] in split.py.

    Making it, `add_param_group`, `step`, `clip_grad_norm_` and `consolidated_state_dict` are collectives: call them in
    the same way on all ranks. Making it copies rank 0's parameters to all ranks, and with `module` its other parameters
    and its buffers, too. The parameters stay the same objects; their memory becomes a part of flat buffers.

    Raises UsageError for an optimizer or parameters that cannot be sharded, CollectiveMismatch naming both sides if ranks
    are given different parameters or options, and ClosedError if the backend is closed. Used by one thread at a time. It
    does not own the backend.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer_class: OptimizerClass,
        backend: Backend,
        *,
        module: nn.Module | None = None,
        units: UnitChoice = None,
        split: Split | str | None = None,
        reduce_gradients: bool = True,
        bucket_bytes: int = 25 * MIB,
        **options: Any,
    ) -> None:
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        if units is not None and module is None:
            raise UsageError("units choose parts of a module, but no module was given: give module=, too")
        self.split = choose_split(optimizer_class, split)
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, defaults_of(optimizer_class, options))
        self.optimizer_class = optimizer_class
        self.module = module
        self._backend = backend
        self._reduces = reduce_gradients
        self._character = (
            f"{optimizer_class.__name__} split by {self.split}, bucket_bytes={bucket_bytes}, reduce_gradients={reduce_gradients}"
        )
        self._units = Units(module, units)
        self._comms = Communicators(backend, sharding_ranks(ShardingStrategy.FULL_SHARD, backend.rank, backend.world_size, ()))
        self._sharded = ShardedParameters(self._units, self.split, bucket_bytes, self._comms)
        self._gathers = Gathers()
        self._reduced: reduction.ReducedGradients | None = None  # from clip_grad_norm_ to step
        self._stepping = False
        self._stepped_alike = False
        self._shard_groups(range(len(self.param_groups)))
        groups = [self._inner_group(group) for group in self.param_groups]
        self._inner = optimizer_class(groups, **options)
        if module is not None:
            self._sharded.copy_rest_from_root(module)
            wait_before_use(module, self._units.needs(module), self._gathers)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def memory(self) -> MemoryMeter:
        """The packed gradients: bytes now, and the most at once."""
        return self._sharded.memory

    # --- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. A collective: rank 0's values reach every rank.

        Raises StateError between `clip_grad_norm_` and `step`.
        """
        if self._inner is None:  # called by the base class, which is being made
            super().add_param_group(param_group)
            return
        if self._reduced is not None:
            raise StateError(
                "add_param_group() was called between clip_grad_norm_(), last_backward() or a scaler's unscale_() and step(), where the "
                "new parameters' gradients would be lost: call it after step()"
            )
        super().add_param_group(param_group)
        try:
            self._shard_groups([len(self.param_groups) - 1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._inner.add_param_group(self._inner_group(self.param_groups[-1]))

    def wait(self) -> None:
        """Block until all parameters are gathered; nothing to do if they are.

        Raises the error of a gather that failed, and StateError ever after.
        """
        self._gathers.wait()

    # --- gradients and the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done already, step this rank's slices and start gathering the new parameters. A
        collective.

        A parameter that has a gradient on no rank is left alone, as in one process; if only some ranks have one, it
        counts as zeros on the others. `closure` is called once, with gradients enabled, and its result returned. If
        nobody has waited for parameters of the last step, `step` waits for them first.

        Raises StateError if options such as learning rates differ over ranks, if gradients were changed after
        `clip_grad_norm_` or `last_backward`, and if called within itself; PeerLost and other CollectiveErrors if a collective fails. If
        one fails before the slices were stepped, nothing has changed; after that, parameters stay unusable: see `wait`.
        """
        with self._exclusively():
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            reduced = self._reduce()
            try:
                self._step_pieces()
            finally:
                self._drop_gradients()
            self._start_gathers(reduced.stepped)
        return result

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Average gradients while backward computes those of other units, each bucket as soon as all of its parameters have one.

            with optimizer.last_backward():
                loss.backward()
            optimizer.step()

        Gradients and steps are bit for bit the same as without it. Of several backwards before a step only the last one belongs
        here. When the context ends, all gradients are averaged: a collective, which all ranks must enter, though some may run no
        backward in it. Gradients must not be changed after that, until `step` or `zero_grad`.

        Raises StateError within a step or another `last_backward`, and between `clip_grad_norm_` and `step`; CollectiveErrors
        from backward or at the end. If it raises, only the gradients have changed; but if ranks were at different places in
        backward, their reductions no longer match, and later ones raise CollectiveMismatch.
        """
        with self._exclusively():
            if self._reduced is not None:
                raise StateError("gradients are averaged already: call step() or zero_grad() before another last_backward()")
            reductions = self._reductions()
            try:
                with reductions.in_backward() if self._reduces else nullcontext():
                    yield
                with torch.no_grad():
                    self._reduce(reductions)
            except BaseException:
                reductions.abandon()
                raise

    @torch.no_grad()
    def average_gradients(self) -> torch.optim.Optimizer:
        """Average the gradients, unless that was done already, for a scaler to unscale. A collective; call it after the last backward.

        Returns the wrapped optimizer, whose parameters are this rank's slices; their `grad` is what `step` will take.
        """
        with self._exclusively():
            self._reduce()
        return self._require_inner()

    @contextmanager
    def stepped_alike(self) -> Iterator[None]:
        """For a scaler that, within this context, calls `step` on all ranks or on none; the averaged gradients are dropped at its end."""
        self._stepped_alike = True
        try:
            yield
        finally:
            self._stepped_alike = False
            self._drop_gradients()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Torch's scalers ask this before each step. False: they must unscale gradients as for any optimizer.

        If a scaler skipped a step on one rank only, the other ranks would average with that rank's next step, and nobody would notice.
        """
        if not self._stepped_alike:
            raise UsageError("torch.amp.GradScaler decides on each rank alone whether to step; use shardnet.fsdp.GradScaler(backend)")
        return False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Average the gradients, clip them by their norm over all ranks and parameters, and return that norm.

        0-dim float64, equal on all ranks. A collective; call it after the last backward. `step` then takes the clipped
        gradients, while the parameters' own `grad` stays as it is. (`torch.nn.utils.clip_grad_norm_` would clip this
        rank's gradients by their own norm, before they are averaged.)
        """
        with self._exclusively():
            self._reduce()
            gradients = reduction.gradients_of(self._sharded.pieces)
            total = global_norm(gradients, norm_type, torch.device("cpu"), self._comms)
            scale_to_norm(gradients, total, max_norm)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients, and what `clip_grad_norm_` has averaged."""
        super().zero_grad(set_to_none)
        self._drop_gradients()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as torch lays it out, and under "shard" what part that is. No traffic.

        The tensors are the optimizer's own. `merge_state_dicts` puts those of all ranks together. Raises StateError in
        torch.distributed.checkpoint, which takes any state dict for the whole one.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise StateError(
                "get_state_dict() and get_optimizer_state_dict() would save this rank's part of a ZeroOptimizer's state as if it were all: "
                "save its consolidated_state_dict() with torch.distributed.checkpoint, or model and optimizer with shardnet.checkpoint"
            )
        own = [self._sharded.slices[parameter] for group in self.param_groups for parameter in group["params"]]
        shard = Shard(self._backend.rank, self._backend.world_size, self.split, tuple(own))
        return {**super().state_dict(), SHARD_KEY: shard.to_plain()}

    def consolidated_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state, as the wrapped optimizer would have saved it in one process, gathered bucket by bucket.

        Plain torch loads it, and so does `load_state_dict` at any world size. A collective. With `rank0_only` the other
        ranks keep nothing and get {}.
        """
        self.wait()
        local = super().state_dict()
        number = {parameter: index for index, parameter in enumerate(self._parameters())}
        state = {}
        for _, bucket in self._sharded.buckets:
            gathered = consolidate(bucket, number, local["state"], self.split, self._comms)
            if self._backend.rank == ROOT or not rank0_only:
                state.update(gathered)
        if rank0_only and self._backend.rank != ROOT:
            return {}
        return {"state": dict(sorted(state.items())), "param_groups": local["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a consolidated state, from any world size or plain torch, or what `state_dict` returned on this rank. No traffic.

        Raises UsageError for another rank's part, or one that was cut in another way; ValueError, as torch does, for
        another number of groups or parameters.
        """
        inner = self._require_inner()
        state = self._own_part(state_dict)
        self._drop_gradients()
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        self._pass_options(self.param_groups, inner.param_groups)
        owned: defaultdict[Tensor, Any] = defaultdict(dict)
        owned.update(
            (self._sharded.pieces[parameter], entry) for parameter, entry in self.state.items() if parameter in self._sharded.pieces
        )
        inner.__setstate__({"state": owned, "param_groups": inner.param_groups})

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError(
            "a sharded optimizer cannot be copied or pickled, since other ranks hold parts of it; use its consolidated_state_dict()"
        )

    # --- making

    def _shard_groups(self, indices: Iterable[int]) -> None:
        """Take in the parameters of some groups, after checking that all ranks were given the same. A collective."""
        named = {index: self._named(index) for index in indices}
        together = [entry for entries in named.values() for entry in entries]
        check_parameters(together)
        refuse_overlaps(together)
        lines = [self._character, *describe(self.param_groups, named)]
        check_alike(lines, self._comms, "the optimizers", "give the same parameters in the same order and the same options on all ranks")
        self._sharded.add(together)

    def _named(self, index: int) -> list[tuple[str, Tensor]]:
        group = self.param_groups[index]
        given = group.get("param_names") or [f"parameter {place} of group {index}" for place in range(len(group["params"]))]
        return [(self._units.name_of(parameter, name), parameter) for name, parameter in zip(given, group["params"], strict=True)]

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group for the wrapped optimizer: the same options, and this rank's pieces."""
        pieces = [self._sharded.pieces[parameter] for parameter in group["params"] if parameter in self._sharded.pieces]
        return {**{key: value for key, value in group.items() if key != "param_names"}, "params": pieces}

    # --- helpers

    def _parameters(self) -> Iterator[Tensor]:
        """All parameters, in the order that numbers them in state dicts."""
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _require_inner(self) -> torch.optim.Optimizer:
        assert self._inner is not None, "the constructor has not ended"
        return self._inner

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if self._stepping:
            raise StateError(
                "step(), clip_grad_norm_(), last_backward() or a scaler's unscale_() was called within a step or last_backward(), by its "
                "closure or a hook: call it before or after"
            )
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _reductions(self) -> reduction.Reductions:
        return reduction.Reductions([bucket for _, bucket in self._sharded.buckets], self._sharded.pieces, self._comms)

    def _reduce(self, reductions: reduction.Reductions | None = None) -> reduction.ReducedGradients:
        """Give the pieces their gradients, unless that was done already; `reductions` are those that backward has begun."""
        self.wait()
        if self._reduced is not None:
            self._reduced.check_current()
            return self._reduced
        parameters = list(self._parameters())
        self._sharded.reattach()
        reductions = reductions or self._reductions()
        present = [parameter.grad is not None for parameter in parameters]
        agreed = agree_on_step(present, reductions.changed(), self.param_groups, self._comms)
        active = dict(zip(parameters, agreed.someone, strict=True))
        stepped = self._sharded.having(active)
        if self._reduces:
            reductions.finish(active, agreed.again)
        else:
            self._check_averaged(agreed.someone, agreed.everyone)
            reduction.take_own([bucket for _, bucket in stepped], self._sharded.pieces)
        self._reduced = reduction.ReducedGradients(stepped, parameters)
        return self._reduced

    def _step_pieces(self) -> None:
        """Let the wrapped optimizer step, with the options that the user sees, and show its state."""
        inner = self._require_inner()
        self._pass_options(self.param_groups, inner.param_groups)
        with self._backend.telemetry.span("optimizer step"):
            inner.step()
        self._pass_options(inner.param_groups, self.param_groups)
        self.state.update((parameter, inner.state[piece]) for parameter, piece in self._sharded.pieces.items() if piece in inner.state)

    def _check_averaged(self, someone: Sequence[bool], everyone: Sequence[bool]) -> None:
        names = [name for index in range(len(self.param_groups)) for name, _ in self._named(index)]
        for name, some, each in zip(names, someone, everyone, strict=True):
            if some and not each:
                raise StateError(
                    f"{name} has a gradient on some ranks only, but reduce_gradients=False promises that gradients are averaged already: "
                    "average them on all ranks before step(), or leave reduce_gradients=False out"
                )

    def _drop_gradients(self) -> None:
        self._reduced = None
        reduction.drop(self._sharded.pieces)

    @staticmethod
    def _pass_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        for giving, taking in zip(source, target, strict=True):
            taking.update((key, value) for key, value in giving.items() if key not in ("params", "param_names"))

    def _start_gathers(self, stepped: Sequence[Owned]) -> None:
        # Like an optimizer's own writes, this makes autograd refuse a backward that needs the old values.
        torch.autograd.graph.increment_version([parameter for _, bucket in stepped for parameter in bucket.parameters])
        self._gathers.start(stepped)
        self._gathers.wait_for(None)

    def _own_part(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """This rank's state from either form of state dict, by number."""
        numbered = dict(enumerate(self._parameters()))
        if SHARD_KEY not in state_dict:
            return {
                index: cut(entry, self._sharded.slices[numbered[index]], self.split)
                for index, entry in state_dict["state"].items()
                if index in numbered and numbered[index] in self._sharded.pieces
            }
        shard = Shard.from_plain(state_dict[SHARD_KEY])
        if shard != Shard.from_plain(self.state_dict()[SHARD_KEY]):
            raise UsageError(
                f"the state dict is from rank {shard.rank} of {shard.world_size}, whose part differs from that of rank "
                f"{self._backend.rank} of {self._backend.world_size} here; merge the state dicts of all ranks with merge_state_dicts() and "
                "load the result"
            )
        return dict(state_dict["state"])
