"""`ShardnetProcessGroup`: the process group that torch makes for "shardnet", for the default group and for parts of it."""

# torch's stubs overload these methods with forms that it never calls on a subclass:
# mypy: disable-error-code="override, assignment"

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.interop.collectives import Collectives
from shardnet.interop.reducers import keep_works
from shardnet.interop.registration import DEVICES
from shardnet.interop.reordered import in_order
from shardnet.interop.store import placed_world
from shardnet.interop.world import World
from shardnet.training.last_words import LastWords
from shardnet.uncompiled import uncompiled

_worlds: list[World] = []  # the worlds of which this process is a member: one at most


def create(options: Any) -> "ShardnetProcessGroup":
    """Make a new group. The first one connects the processes; others consist of some of its ranks, and need no connections of their own."""
    ranks, timeout_s = list(options.global_ranks_in_group), options.timeout.total_seconds()
    if ranks and not _worlds:
        raise StateError(
            "a group of backend 'shardnet' needs a default group of backend 'shardnet', which connects the processes; "
            "call init_process_group('shardnet') first"
        )
    if not ranks:
        if not 0 <= options.group_rank < options.group_size:
            raise UsageError(
                f"rank must be from 0 to {options.group_size - 1} in a world of {options.group_size}, got {options.group_rank}; "
                "check RANK and WORLD_SIZE, or the arguments of init_process_group"
            )
        keep_works()
        placed = placed_world(options.store)
        world = World.meet(options.store, options.group_rank, options.group_size, timeout_s) if placed is None else placed
        _worlds[:] = [world]
        return ShardnetProcessGroup(world.backend, world, options, owns=True)
    world = _worlds[0]
    return ShardnetProcessGroup(in_order(world.backend, ranks), world, options, owns=False)


def _say_why() -> None:
    """At the end of a program that an error has ended, tell the other ranks."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt, errors end nothing
    for world in _worlds:
        if error is not None and world.pid == os.getpid():
            world.give_up(LastWords.of(error))


atexit.register(_say_why)


@uncompiled
class ShardnetProcessGroup(Collectives):
    """Some ranks of a world; lives until `destroy_process_group`. The default group owns the world. Any thread."""

    def __init__(self, backend: Backend, world: World, options: Any, *, owns: bool) -> None:
        ranks = list(options.global_ranks_in_group) or list(range(backend.world_size))
        super().__init__(backend, ranks, options.timeout.total_seconds(), world.ends)
        self._world = world
        self._name: str = options.group_id
        self._store: c10d.Store = options.store
        self._owns = owns

    # --- who it is

    def name(self) -> str:
        return "shardnet"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "shardnet"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> "ShardnetProcessGroup":
        """The backend for tensors of a device; torch asks for it to learn its abilities."""
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(f"the backend 'shardnet' does not support device {device}")
        return self

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it carries: torch puts checkpoints together, and splits groups, on one of these."""
        return [torch.device(each) for each in DEVICES if each == "cpu" or torch.cuda.is_available()]

    supports_reconfigure = False
    supports_window = False
    supports_coalescing = False  # as NCCL does it: several collectives as one launch

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        return False

    @property
    def backend(self) -> Backend:
        """The backend that carries this group's collectives."""
        return self._backend

    @property
    def address(self) -> str:
        """host:port where this rank answers: `shardnet status ADDRESS`, health checks."""
        return self._world.address

    def get_group_store(self) -> c10d.Store:
        return self._store

    @property
    def options(self) -> c10d.Backend.Options:
        """Read-only: `_timeout` is the timeout of a collective that gives none."""
        return c10d.Backend.Options(self.getBackendName(), timedelta(seconds=self._timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has called."""
        return self._collectives

    # --- groups of its ranks

    supports_splitting = True

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> "ShardnetProcessGroup | None":
        """Make a group of some of its ranks, numbered in the given order; None on the other ranks."""
        if self.rank() not in new_ranks:
            return None
        options = c10d._DistributedBackendOptions()
        options.group_id = group_name or f"{self._name}/{'_'.join(map(str, new_ranks))}"
        options.store = c10d.PrefixStore(f"{options.group_id}/", self._store)
        options.timeout = timedelta(seconds=self._timeout_s) if timeout is None else timeout
        options.global_ranks_in_group = [self._ranks[rank] for rank in new_ranks]
        group = ShardnetProcessGroup(in_order(self._backend, new_ranks), self._world, options, owns=False)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def eager_connect_single_device(self, _: torch.device | None) -> None:
        """Nothing to do: a group's ranks are connected already."""

    def perform_nocolor_split(self, _: torch.device) -> None:
        """Nothing to do: ranks outside a new group have no part in making it."""

    # --- the end

    def shutdown(self) -> None:
        """Say goodbye to the other ranks and close the port, if this is the default group. Waits for running collectives."""
        if self._owns:
            self._world.close()
            self._forget()

    def abort(self) -> None:
        """Fail running collectives, here and on the other ranks, and close at once: the default group closes all groups, others only
        themselves."""
        if self._owns:
            self._world.abort()
            self._forget()
        else:
            self._backend.disband(f"group {self._name!r} was aborted")

    def _forget(self) -> None:
        _worlds[:] = [each for each in _worlds if each is not self._world]
