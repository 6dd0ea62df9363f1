"""`ShardnetProcessGroup`: torch's collectives, in the words of `Backend`.

What they mean is documented in torch.distributed. Methods have the names by which torch calls them, from Python and from C++; several of
them had others before torch 2.13, and have both here. All ranks must call the same ones in the same order: who does not gets an
error that names both sides, whatever TORCH_DISTRIBUTED_DEBUG says.
"""

# torch's stubs overload these methods with forms that it never calls on a subclass:
# mypy: disable-error-code="override, assignment"

from collections.abc import Sequence
from concurrent.futures import Executor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from shardnet.backend import Backend, Pending
from shardnet.errors import StateError, UsageError
from shardnet.interop.carrying import check, movable, premultiplied, reducible, reduction
from shardnet.interop.registration import DEVICES
from shardnet.interop.rendezvous import placed_world
from shardnet.interop.reordered import in_order
from shardnet.interop.work import AnySourceWork, Finish, PendingWork, Works
from shardnet.interop.world import World

Tensor = torch.Tensor
_worlds: list[World] = []  # that this process is a member of: one at most, or none


def create(options: Any) -> "ShardnetProcessGroup":
    """A new group. The first one connects the processes; others are some of its ranks, and need no connection of their own."""
    ranks, timeout_s = list(options.global_ranks_in_group), options.timeout.total_seconds()
    if ranks and not _worlds:
        raise StateError(
            "a group of backend 'shardnet' needs the default group to be one, too: it is that which connects the processes; "
            "call init_process_group('shardnet') first"
        )
    if not ranks:
        placed = placed_world(options.store)
        world = World.meet(options.store, options.group_rank, options.group_size, timeout_s) if placed is None else placed
        _worlds[:] = [world]
        return ShardnetProcessGroup(world.backend, world, options.group_id, timeout_s, owns=True)
    world = _worlds[0]
    return ShardnetProcessGroup(in_order(world.backend, ranks), world, options.group_id, timeout_s, owns=False)


class ShardnetProcessGroup(dist.ProcessGroup):
    """Some ranks of a world; lives until `destroy_process_group`. The default group owns the world. Any thread.

    Everything returns at once with a torch Work; its `wait` raises shardnet's errors.
    """

    def __init__(self, backend: Backend, world: World, name: str, timeout_s: float, *, owns: bool) -> None:
        super().__init__(backend.rank, backend.world_size)
        self._backend = backend
        self._world = world
        self._name = name
        self._timeout_s = timeout_s
        self._owns = owns
        self._coalesced: list[PendingWork] | None = None  # what is begun between start_coalescing and end_coalescing

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
        """What carries tensors of a device, as torch asks for its abilities."""
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(f"the backend 'shardnet' has nothing for {device}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """Whose tensors it carries."""
        return [torch.device(each) for each in DEVICES if each == "cpu" or torch.cuda.is_available()]

    supports_coalescing = False  # as NCCL does it: several as one launch

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        return False

    @property
    def backend(self) -> Backend:
        """What carries it."""
        return self._backend

    @property
    def address(self) -> str:
        """host:port where this rank answers: `shardnet status ADDRESS`, health checks."""
        return self._world.address

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

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
        """Some of its ranks, numbered as they are given, as a group of their own; None on the others."""
        if self.rank() not in new_ranks:
            return None
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        name = group_name or f"{self._name}/{'_'.join(map(str, new_ranks))}"
        group = ShardnetProcessGroup(in_order(self._backend, new_ranks), self._world, name, timeout_s, owns=False)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def get_group_store(self) -> c10d.Store:
        """torch's own store, under this group's name."""
        store = dist.distributed_c10d._get_default_store()
        return store if self._owns else c10d.PrefixStore(f"{self._name}/", store)

    def eager_connect_single_device(self, _: torch.device | None) -> None:
        """Nothing to do: a group's ranks are connected already."""

    def perform_nocolor_split(self, _: torch.device) -> None:
        """Nothing to do: who is no member of a new group has no part in making it."""

    # --- one tensor

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        options = opts or c10d.AllreduceOptions()
        return _joined([self._all_reduce(each, options) for each in tensors])

    def _all_reduce(self, tensor: Tensor, opts: Any) -> PendingWork:
        check([tensor])
        op, factor = reduction(opts.reduceOp)
        flat = reducible(premultiplied(tensor, factor), op)
        out = reducible(tensor, op) if tensor.is_contiguous() else torch.empty_like(flat)
        pending = self._backend.all_reduce(flat, op, out=out, timeout_s=self._timeout(opts))
        return self._work(pending, [tensor], None if tensor.is_contiguous() else partial(_put, tensor))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        options = opts or c10d.BroadcastOptions()
        check(tensors)
        works = []
        for tensor in tensors:
            flat = movable(tensor)
            pending = self._backend.broadcast(flat, options.rootRank, out=flat, timeout_s=self._timeout(options))
            works.append(self._work(pending, [tensor], None if tensor.is_contiguous() else partial(_put, tensor)))
        return _joined(works)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingWork:
        check([output, input])
        _check_sizes("all_gather", output.numel(), self.size() * input.numel())
        _check_dtypes("all_gather", output, input)
        out = movable(output)
        pending = self._backend.all_gather(movable(input), out=out, timeout_s=self._timeout(opts))
        return self._work(pending, [output], None if output.is_contiguous() else partial(_put, output))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingWork:
        options = opts or c10d.ReduceScatterOptions()
        check([output, input])
        _check_sizes("reduce_scatter", input.numel(), self.size() * output.numel())
        _check_dtypes("reduce_scatter", output, input)
        op, factor = reduction(options.reduceOp)
        out = reducible(output, op)
        pending = self._backend.reduce_scatter(reducible(premultiplied(input, factor), op), op, out=out, timeout_s=self._timeout(options))
        return self._work(pending, [output], None if output.is_contiguous() else partial(_put, output))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] = (), input_split_sizes: Sequence[int] = (), opts: Any = None
    ) -> PendingWork:
        check([output, input])
        _check_dtypes("all_to_all", output, input)
        sends = self._rows(input, input_split_sizes, "input_split_sizes")
        receives = self._rows(output, output_split_sizes, "output_split_sizes")
        pending = self._exchange(movable(input), _scaled(sends, input), _scaled(receives, output), opts)
        return self._work(pending, [output], partial(_put, output))

    def _rows(self, tensor: Tensor, split: Sequence[int], what: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not split:
            if rows % self.size():
                raise UsageError(f"all_to_all of {rows} rows over {self.size()} ranks needs {what}")
            return [rows // self.size()] * self.size()
        if sum(split) != rows:
            raise UsageError(f"{what} {list(split)} add up to {sum(split)}, but the tensor has {rows} rows")
        return list(split)

    # --- lists of tensors

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _joined([self._all_gather(out, each, opts) for out, each in zip(outputs, inputs, strict=True)])

    def _all_gather(self, outputs: list[Tensor], input: Tensor, opts: Any) -> PendingWork:
        check([*outputs, input])
        flat = movable(input)
        sizes = [movable(each).numel() for each in outputs]
        if len(sizes) != self.size() or sizes[self.rank()] != flat.numel():
            raise UsageError(
                f"all_gather on rank {self.rank()} of {self.size()}: {len(sizes)} outputs, this rank's of {input.numel()} elements"
            )
        pending = self._backend.all_gather(flat, sizes=sizes, timeout_s=self._timeout(opts))
        return self._work(pending, outputs, partial(_put_all, outputs))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        options = opts or c10d.ReduceScatterOptions()
        return _joined([self._reduce_scatter(out, parts, options) for out, parts in zip(outputs, inputs, strict=True)])

    def _reduce_scatter(self, output: Tensor, parts: list[Tensor], opts: Any) -> PendingWork:
        check([output, *parts])
        if len(parts) != self.size():
            raise UsageError(f"reduce_scatter over {self.size()} ranks got {len(parts)} tensors")
        op, factor = reduction(opts.reduceOp)
        flats = [reducible(premultiplied(part, factor), op) for part in parts]
        sizes = [each.numel() for each in flats]
        pending = self._backend.reduce_scatter(torch.cat(flats), op, sizes=sizes, timeout_s=self._timeout(opts))
        return self._work(pending, [output], partial(_put, output))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PendingWork:
        check([*outputs, *inputs])
        if not len(outputs) == len(inputs) == self.size():
            raise UsageError(f"all_to_all over {self.size()} ranks got {len(inputs)} tensors to send and {len(outputs)} to receive into")
        sends, receives = [movable(each) for each in inputs], [movable(each).numel() for each in outputs]
        pending = self._exchange(torch.cat(sends), [each.numel() for each in sends], receives, opts)
        return self._work(pending, outputs, partial(_put_all, outputs))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PendingWork:
        options = opts or c10d.GatherOptions()
        here, parts = options.rootRank == self.rank(), outputs[0] if outputs else []
        check([*parts, *inputs])
        if here and len(parts) != self.size():
            raise UsageError(f"gather over {self.size()} ranks got {len(parts)} tensors to gather into on its destination")
        flat = movable(inputs[0])
        sends = [flat.numel() if rank == options.rootRank else 0 for rank in range(self.size())]
        receives = [movable(each).numel() for each in parts] if here else [0] * self.size()
        pending = self._exchange(flat, sends, receives, options)
        return self._work(pending, parts, partial(_put_all, parts) if here else None)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> PendingWork:
        options = opts or c10d.ScatterOptions()
        here, parts = options.rootRank == self.rank(), inputs[0] if inputs else []
        check([*outputs, *parts])
        if here and len(parts) != self.size():
            raise UsageError(f"scatter over {self.size()} ranks got {len(parts)} tensors on its source")
        flats, output = [movable(each) for each in parts], outputs[0]
        sends = [each.numel() for each in flats] if here else [0] * self.size()
        receives = [movable(output).numel() if rank == options.rootRank else 0 for rank in range(self.size())]
        pending = self._exchange(torch.cat(flats) if here else movable(output)[:0], sends, receives, options)
        return self._work(pending, [output], partial(_put, output))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        options = opts or c10d.ReduceOptions()
        check(tensors)
        tensor, here = tensors[0], options.rootRank == self.rank()
        op, factor = reduction(options.reduceOp)
        flat = reducible(premultiplied(tensor, factor), op)
        sizes = [flat.numel() if rank == options.rootRank else 0 for rank in range(self.size())]
        pending = self._backend.reduce_scatter(flat, op, sizes=sizes, timeout_s=self._timeout(options))
        return self._work(pending, [tensor], partial(_put, tensor) if here else None)

    def _exchange(self, flat: Tensor, sends: list[int], receives: list[int], opts: Any) -> Pending[Tensor]:
        return self._backend.all_to_all(flat, send_sizes=sends, recv_sizes=receives, timeout_s=self._timeout(opts))

    # --- several at once

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts or c10d.AllreduceCoalescedOptions())

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _joined([self.all_gather_single(out, each, opts) for out, each in zip(outputs, inputs, strict=True)])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`outputs` are lists by rank, of one tensor for each input."""
        return _joined([self._all_gather([row[index] for row in outputs], each, opts) for index, each in enumerate(inputs)])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _joined([self.reduce_scatter_single(out, each, opts) for out, each in zip(outputs, inputs, strict=True)])

    def start_coalescing(self, _: torch.device) -> None:
        self._coalesced = []

    def end_coalescing(self, _: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return _joined(works)

    # --- from rank to rank

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> PendingWork:
        check(tensors)
        tensor = tensors[0]
        return self._work(self._backend.send(movable(tensor), to, tag=self._tag(tag), timeout_s=self._timeout_s), [tensor])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PendingWork:
        check(tensors)
        tensor = tensors[0]
        pending = self._backend.recv(movable(tensor), source, tag=self._tag(tag), timeout_s=self._timeout_s)
        return self._work(pending, [tensor], None if tensor.is_contiguous() else partial(_put, tensor))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PendingWork:
        check(tensors)
        tensor = tensors[0]
        flat, in_place = movable(tensor), tensor.device.type == "cpu" and tensor.is_contiguous()
        if not in_place:
            flat = torch.empty_like(flat, device="cpu")
        pending = self._backend.recv_any(flat, tag=self._tag(tag), timeout_s=self._timeout_s)
        return self._work(pending, [tensor], None if in_place else lambda _: _put(tensor, flat), kind=AnySourceWork)

    recvAnysource = recv_anysource  # noqa: N815 - torch's name

    def barrier(self, opts: Any = None) -> PendingWork:
        return self._work(self._backend.barrier(timeout_s=self._timeout(opts)), [])

    # --- old names (torch before 2.13)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- the end

    def shutdown(self) -> None:
        """Say goodbye to the other ranks and close the port, if this is the default group. Waits for what is under way."""
        if self._owns:
            self._world.close()
            _worlds[:] = [each for each in _worlds if each is not self._world]

    def abort(self) -> None:
        """Fail what is under way, here and on the other ranks, and close at once: the default group with all others, another one alone."""
        if self._owns:
            self._world.abort()
        else:
            self._backend.disband(self._tag(""), f"group {self._name!r} was aborted")

    # --- helpers

    def _work(
        self, pending: Pending[Any], outputs: Sequence[Tensor], finish: Finish | None = None, *, kind: type[PendingWork] = PendingWork
    ) -> PendingWork:
        work = kind(pending, outputs, self._ends, finish)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @property
    def _ends(self) -> Executor:
        return self._world.ends

    def _timeout(self, opts: Any) -> float:
        """Seconds: a call's own, or the group's."""
        given = None if opts is None else opts.timeout
        return self._timeout_s if given is None or given <= timedelta(0) else float(given.total_seconds())

    def _tag(self, tag: int | str) -> str:
        return f"{self._name}:{tag}"


def _joined(works: list[PendingWork]) -> dist.Work:
    return works[0] if len(works) == 1 else Works(works)


def _put(target: Tensor, result: Tensor) -> None:
    """A flat result, which may be bytes or pairs of real numbers, into a tensor of any strides."""
    with torch.no_grad():
        target.detach().copy_(_like(result, target))


def _put_all(targets: Sequence[Tensor], result: Tensor) -> None:
    start = 0
    for target in targets:
        count = target.numel() * target.itemsize // result.itemsize
        _put(target, result[start : start + count])
        start += count


def _like(flat: Tensor, target: Tensor) -> Tensor:
    if flat.dtype != target.dtype:
        flat = flat.clone().view(torch.uint8).view(target.dtype)  # cloned: a slice of bytes may lie where no such element can
    return flat.view(target.shape)


def _scaled(rows: Sequence[int], tensor: Tensor) -> list[int]:
    """Elements that a `Backend` sees for so many rows."""
    width = tensor.shape[1:].numel() if tensor.dim() else 1
    per_element = movable(tensor[:0] if tensor.dim() else tensor.view(1)[:0]).itemsize
    return [count * width * tensor.itemsize // per_element for count in rows]


def _check_sizes(op: str, got: int, expected: int) -> None:
    if got != expected:
        raise UsageError(f"{op}: the tensor of all ranks has {got} elements where {expected} are needed")


def _check_dtypes(op: str, output: Tensor, input: Tensor) -> None:
    if output.dtype != input.dtype:
        raise UsageError(f"{op}: output of {output.dtype}, input of {input.dtype}; they must be alike")
