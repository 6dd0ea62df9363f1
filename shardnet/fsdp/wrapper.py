"""`FSDP`: the module wrapper that users see."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardnet.backend import Backend, Pending
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import state
from shardnet.fsdp.clipping import global_norm, scale_to_norm
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.group import FlatGroup, sharded_by
from shardnet.fsdp.hooks import attach
from shardnet.fsdp.initial import copy_buffers_from_root, shard_from_root
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import UnitChoice, plan_units
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.runtime import Runtime
from shardnet.fsdp.unit import Unit
from shardnet.sharding import ShardingStrategy, sharding_ranks

Tensor = torch.Tensor


class FSDP(nn.Module):
    """A module whose parameters, gradients and optimizer state are spread over the ranks of a backend.

    `units` names the submodules that are gathered and freed one by one: module classes, or a predicate
    `(name, module) -> bool`. What is in none of them belongs to the root unit, gathered during the whole forward.
    `strategy` says what is spread over which ranks (`ShardingStrategy`); HYBRID_SHARD's nodes have `intra_node_size`
    ranks each, and are those that the rendezvous found if it is left out. `prefetch` is how many units are gathered ahead
    of the one that computes, in forward and backward; with 0 nothing overlaps, and each more costs the memory of one more
    unit.

    Making it is a collective: rank 0's parameters and buffers reach every rank, and afterwards each parameter, still
    the same object, is 1-D and holds this rank's slice, possibly empty. Optimizers may be made before or after.
    Every rank must then do the same: run the same units in the same order and call the methods marked as collectives
    alike. A training loop stays as it was: `loss = model(x)`, `loss.backward()`, `optimizer.step()`; gradients are the
    mean over ranks. A parameter that no rank used gets zeros as its gradient, where one process would leave None.
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
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise UsageError(f"prefetch must not be negative, got {prefetch}")
        if intra_node_size is not None and strategy != ShardingStrategy.HYBRID_SHARD:
            raise UsageError(f"intra_node_size is for HYBRID_SHARD; {ShardingStrategy(strategy).name} has no nodes")
        if any(isinstance(inner, FSDP) for inner in module.modules()):
            raise UsageError("the module contains an FSDP module already; name its parts in `units` instead of wrapping twice")
        for name, parameter in module.named_parameters():
            if (unit := sharded_by(parameter)) is not None:
                raise UsageError(f"{name} is sharded already, in {unit} of another FSDP model; models cannot share parameters")
        self.module = module
        self.strategy = ShardingStrategy(strategy)
        self.memory = MemoryMeter()
        ranks = sharding_ranks(self.strategy, backend.rank, backend.world_size, backend.node_ranks, intra_node_size)
        self._comms = Communicators(backend, ranks)
        pool = BufferPool(self.memory)
        self.units = tuple(Unit(plan, self._comms, self.memory, pool) for plan in plan_units(module, units))
        shard_from_root(self.groups, self._comms)
        copy_buffers_from_root(module, self._comms)
        self._runtime = Runtime(self.units, self._comms, prefetch, keep=not self.strategy.frees_after_forward)
        self._hooks = [handle for unit in self.units for handle in attach(unit, self._runtime)]

    @property
    def backend(self) -> Backend:
        return self._comms.backend

    @property
    def groups(self) -> list[FlatGroup]:
        """The flat groups of all units, in registration order."""
        return [group for unit in self.units for group in unit.groups]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's forward. A collective. If it raises, everything is back at shard size."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):  # such as KeyboardInterrupt, for which modules run no hooks
                self._runtime.reset()
            raise

    # --- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within it only adds up gradients on this rank, in full size; the next backward outside, or
        `sync_gradients`, reduces the sum. Enter and leave it on all ranks alike."""
        before, self._runtime.synchronise = self._runtime.synchronise, False
        try:
            yield
        finally:
            self._runtime.synchronise = before

    def sync_gradients(self) -> None:
        """Reduce gradients that no backward has reduced; a missing one counts as zeros. Always the mean. A collective.

        Nothing is left to do after a normal backward. Raises StateError before the first forward.
        """
        self._runtime.synchronise_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all ranks, and return that norm: 0-dim float64, equal on all ranks.
        A collective. `torch.nn.utils.clip_grad_norm_` would take each rank's slices for the whole."""
        if self._runtime.unreduced:
            raise StateError("gradients of no_sync() are not reduced yet; call sync_gradients() before clipping")
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        device = next((group.shard.device for group in self.groups), torch.device("cpu"))
        with torch.no_grad():
            total = global_norm(gradients, norm_type, device, self._comms)
            scale_to_norm(gradients, total, max_norm)
        return total

    # --- explicit control of parameters

    def prefetch_forward_params(self) -> list[Pending[None]]:
        """Start gathering what the next forward needs first, and return at once. A collective.

        Awaiting the handles is optional: forward does. Changing parameters in between is allowed and never lost.
        Raises StateError if an earlier prefetch has not been used yet, and UsageError for a strategy that has nothing to
        prefetch because full parameters are there already.
        """
        if not self.strategy.frees_after_forward:
            raise UsageError(f"prefetch_forward_params is for strategies FullShard and HybridShard; this model has {self.strategy.name}")
        return self._runtime.prefetcher.start_explicit()

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a prefetch waits for its forward."""
        return self._runtime.prefetcher.explicit_pending

    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's slices, given end to end in the order of `parameters()`; no traffic."""
        held = list(self.parameters())
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
        if self.strategy is ShardingStrategy.SHARD_GRAD_OP:
            self._runtime.prefetcher.gather_all()

    def unwrap(self) -> nn.Module:
        """Return the inner module with whole parameters, the same objects, and without hooks. A collective, and the end
        of this wrapper."""
        self._runtime.reset()
        for group in self.groups:
            group.release(group.gather_copy("unwrap"))
        while self._hooks:
            self._hooks.pop().remove()
        return self.module

    # --- state

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Whole parameters and buffers under the inner module's names, gathered unit by unit. A collective.

        With `rank0_only` the other ranks keep nothing and get {}.
        """
        return state.full_state(self.module, self.groups, keep=not rank0_only or self.backend.rank == 0)

    def sharded_state_dict(self) -> state.ShardedState:
        """This rank's slices and what says where they belong; no traffic."""
        return state.sharded_state(self.module, self.groups, self._comms.shard_rank)

    def load_full_state_dict(self, full: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load whole parameters, from `full_state_dict` of any world size or from an unwrapped module; no traffic.

        Every rank must be given the same.
        """
        return state.load_full_state(self.module, self.groups, self._comms.shard_rank, full, strict=strict)

    def load_sharded_state_dict(self, sharded: state.ShardedState) -> None:
        """Load what `sharded_state_dict` gave on the same rank of as many ranks; no traffic."""
        state.load_sharded_state(self.module, self.groups, self._comms.shard_rank, sharded)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The same as `full_state_dict()`; a collective."""
        return self.full_state_dict()

    def load_state_dict(self, full: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """The same as `load_full_state_dict`."""
        return self.load_full_state_dict(full, strict=strict)

    # --- nn.Module, with the names of the inner module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's slices under the inner module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the inner module's names."""
        return self.module.named_buffers(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError("a sharded model cannot be copied or pickled, since others hold its parts; take its full_state_dict()")

    def _apply(self, *args: Any, **kwargs: Any) -> "FSDP":
        raise StateError("a sharded model cannot be moved or converted: call .to(), .half() and the like before wrapping it")
