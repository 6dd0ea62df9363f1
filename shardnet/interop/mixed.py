"""`MixedProcessGroup`: a group in which shardnet carries the tensors of some devices and other backends those of others, as
`init_process_group("cpu:shardnet,cuda:nccl")` makes it.

[Note: groups of several backends] torch makes one backend after the other and puts them into its own kind of group. But if a backend gives
it a group written in Python, as shardnet does, torch takes that for the whole group: it drops the backends that it has made, and does not
make the rest. So this group stands in front of two: shardnet's group, and torch's own group with the other backends, which is completed
here in the way that torch does it. A call goes to the group that has the device of its tensors.

Code below Python (symmetric memory, the flight recorder) asks a group for its backends in another way, so the other backends are also
registered in this group.
"""

# torch's stubs do not know how it makes a group, and overload methods with forms that it never calls on a subclass:
# mypy: disable-error-code="override, assignment, attr-defined, union-attr"

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.interop import process_group
from shardnet.interop.process_group import ShardnetProcessGroup
from shardnet.interop.registration import DEVICES, NAME
from shardnet.uncompiled import uncompiled


def create(
    options: Any, others_options: Any, others: dist.ProcessGroup, config: dist.BackendConfig, description: str
) -> "MixedProcessGroup":
    """Make a group of several backends, of which shardnet is one. Raises the errors of the others, and UsageError for a device that
    shardnet does not serve.

    options          the options that torch gives to each backend
    others_options   the program's options for the other backends: `pg_options`
    others           torch's own group, which has the backends that are named before shardnet
    """
    names = config.get_device_backend_map()
    if beyond := sorted(device for device, name in names.items() if name == NAME and device not in DEVICES):
        raise UsageError(f"shardnet supports tensors on {' and '.join(DEVICES)}; name another backend for {' and '.join(beyond)}")
    ours = process_group.create(options)
    try:
        _complete(others, options, others_options, names)
        others._set_group_name(options.group_id)
        others._set_group_desc(description)
        return MixedProcessGroup(ours, others, names, _recorder(others, options, config))
    except BaseException as error:
        ours.abort()  # this tells the other ranks, which may have made all backends
        error.add_note(
            f"The error is from making the other backends in {config}. If one rank cannot make one, torch on the other ranks waits for it."
        )
        raise


def _complete(group: dist.ProcessGroup, options: Any, others_options: Any, names: dict[str, str]) -> None:
    """Make the backends that torch's group lacks, except shardnet's."""
    made = {each.type for each in group._device_types}
    for device, name in names.items():
        if name != NAME:
            if device not in made:
                options.store = c10d.PrefixStore(f"{device}/", group.get_group_store())
                group._register_backend(torch.device(device), _kind(name), _made(name, device, options, others_options))
            group._set_default_backend(_kind(name))


def _made(name: str, device: str, options: Any, others_options: Any) -> Any:
    """Make a backend as torch would have made it, in its wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL if that is set."""
    getattr(dist.Backend, "_ensure_backend_registered", lambda _: None)(name)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:  # older versions make torch's own backends in code that cannot be called
        raise UsageError(
            f"torch {torch.__version__} can make the backend {name!r} only if it is named before shardnet; put '{device}:{name}' "
            "first, or use torch 2.15 or newer"
        )
    if plugin.extended_api:
        backend = plugin.creator_fn(options, others_options)
    else:
        backend = plugin.creator_fn(options.store, options.group_rank, options.group_size, options.timeout)
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or not dist.is_gloo_available():
        return backend
    return distributed_c10d._create_process_group_wrapper(
        wrapped_pg=backend,  # type: ignore[arg-type]
        store_prefix=options.group_id,
        store=options.store,
        rank=options.group_rank,
        world_size=options.group_size,
        timeout=options.timeout,
    )


def _kind(name: str) -> Any:
    return dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)


def _recorder(group: dist.ProcessGroup, options: Any, config: dist.BackendConfig) -> object:
    """torch's flight recorder for a group whose backends have none of their own, if one is wanted. It records while it is referenced."""
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return None
    attach(group, config, list(options.global_ranks_in_group) or list(range(options.group_size)))
    return distributed_c10d._world.pg_flight_recorder_hooks.pop(group, None)


def _by_tensors(name: str) -> Callable[..., Any]:
    """A method that calls the method `name` of the group that has the device of the tensors."""

    def call(self: "MixedProcessGroup", *given: Any, **named: Any) -> Any:
        device = next(_devices([*given, *named.values()]), None)
        if device is None:
            raise UsageError(f"{name} needs at least one tensor, whose device chooses among the backends {self.getBackendName()}, got none")
        return getattr(self._of(device), name)(*given, **named)

    call.__name__ = name
    return call


def _devices(arguments: Iterable[Any]) -> Iterator[torch.device]:
    """The devices of the tensors among the arguments, and in lists among them."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each.device
        elif isinstance(each, list | tuple):
            yield from _devices(each)


@uncompiled
class MixedProcessGroup(dist.ProcessGroup):
    """See [Note: groups of several backends]. Lives until `destroy_process_group`. Any thread."""

    def __init__(self, ours: ShardnetProcessGroup, others: dist.ProcessGroup, names: dict[str, str], recorder: object = None) -> None:
        """names  of the backends, by device; recorder: referenced as long as this group lives"""
        super().__init__(ours.rank(), ours.size())
        self._ours = ours
        self._others = others
        self._names = dict(names)
        self._recorder = recorder
        bound = others.bound_device_id
        if bound is not None and names.get(bound.type) != NAME:  # torch would split the backend of that device for later groups
            self.bound_device_id = bound  # set before the backends are registered, which binds them to it
        for device, name in names.items():
            if name != NAME:
                self._register_backend(torch.device(device), _kind(name), others._get_backend(torch.device(device)))
                self._set_default_backend(_kind(name))

    def _of(self, device: torch.device) -> dist.ProcessGroup:
        """Of the two groups the one that carries tensors of a device."""
        name = self._names.get(device.type)
        if name is None:
            raise RuntimeError(f"the group of the backends {self.getBackendName()} has no backend for device {device}")
        return self._ours if name == NAME else self._others

    # --- who it is

    def name(self) -> str:
        return self.getBackendName()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return ",".join(f"{device}:{name}" for device, name in self._names.items())

    @property
    def group_name(self) -> str:
        return self._ours.group_name

    def _set_group_name(self, name: str) -> None:
        self._ours._set_group_name(name)
        self._others._set_group_name(name)  # type: ignore[arg-type]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        return self._of(device)._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self._names]

    supports_reconfigure = False
    supports_window = False

    @property
    def backend(self) -> Backend:
        """The backend that carries shardnet's part."""
        return self._ours.backend

    @property
    def address(self) -> str:
        """host:port where this rank answers: `shardnet status ADDRESS`, health checks."""
        return self._ours.address

    def get_group_store(self) -> c10d.Store:
        return self._others.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        self._ours.set_timeout(timeout)
        self._others.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        """How many of shardnet's collectives this rank has called."""
        return self._ours._get_sequence_number_for_group()

    # --- groups of its ranks

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """Make a group of some of its ranks, numbered in the given order, with the backends of `device_types`, or all of them; None on the
        other ranks."""
        names = {device: name for device, name in self._names.items() if device_types is None or torch.device(device) in device_types}
        theirs = [torch.device(device) for device, name in names.items() if name != NAME]
        about: dict[str, Any] = {"timeout": timeout, "opts": opts, "group_name": group_name, "group_desc": group_desc}
        others = self._others.split_group(new_ranks, **about, device_types=theirs) if theirs else None
        if len(theirs) == len(names):
            return others
        ours = self._ours.split_group(new_ranks, **about)
        return ours if ours is None or others is None else MixedProcessGroup(ours, others, names)

    # --- collectives

    allreduce = _by_tensors("allreduce")
    broadcast = _by_tensors("broadcast")
    reduce = _by_tensors("reduce")
    allgather = _by_tensors("allgather")
    all_gather_single = _by_tensors("all_gather_single")
    gather = _by_tensors("gather")
    gather_single = _by_tensors("gather_single")
    scatter = _by_tensors("scatter")
    reduce_scatter = _by_tensors("reduce_scatter")
    reduce_scatter_single = _by_tensors("reduce_scatter_single")
    alltoall = _by_tensors("alltoall")
    all_to_all_single = _by_tensors("all_to_all_single")
    send = _by_tensors("send")
    recv = _by_tensors("recv")
    recv_anysource = _by_tensors("recv_anysource")

    allreduce_coalesced = _by_tensors("allreduce_coalesced")
    allgather_coalesced = _by_tensors("allgather_coalesced")
    all_gather_single_coalesced = _by_tensors("all_gather_single_coalesced")
    reduce_scatter_single_coalesced = _by_tensors("reduce_scatter_single_coalesced")

    def start_coalescing(self, device: torch.device) -> None:
        self._of(device)._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        return self._of(device)._end_coalescing(device)

    def barrier(self, opts: c10d.BarrierOptions | None = None, timeout: timedelta | None = None) -> dist.Work:
        """A barrier on the device that the options name; if they name none, by shardnet."""
        options = c10d.BarrierOptions() if opts is None else opts
        if timeout is not None:
            options.timeout = timeout
        device = getattr(options, "device", None)
        return (self._ours if device is None else self._of(device)).barrier(options)

    # --- old names (torch before 2.13)

    _allgather_base = _by_tensors("_allgather_base")
    _reduce_scatter_base = _by_tensors("_reduce_scatter_base")
    alltoall_base = _by_tensors("alltoall_base")
    allgather_into_tensor_coalesced = _by_tensors("allgather_into_tensor_coalesced")
    reduce_scatter_tensor_coalesced = _by_tensors("reduce_scatter_tensor_coalesced")

    # --- the end

    def shutdown(self) -> None:
        """End both groups; shardnet's waits for running collectives."""
        try:
            self._others.shutdown()
        finally:
            self._ours.shutdown()

    def abort(self) -> None:
        """Fail running collectives in both groups."""
        try:
            self._ours.abort()
        finally:
            self._others.abort()
