"""torch's collectives, translated into calls of `Backend`.

torch.distributed documents what they mean. Methods have the names by which torch calls them, from Python and from C++; several of
them had other names before torch 2.13, and have both here. All ranks must call the same ones in the same order: otherwise a rank gets an
error that names both sides, whatever TORCH_DISTRIBUTED_DEBUG says.
"""

# torch's stubs overload these methods with forms that it never calls on a subclass:
# mypy: disable-error-code="override, assignment"

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from shardnet.backend import Backend, Pending
from shardnet.errors import InvalidRankError, UsageError
from shardnet.interop.carrying import check, movable, premultiplied, put, put_all, reducible, reduction
from shardnet.interop.ends import Ends
from shardnet.interop.overloads import overloaded
from shardnet.interop.profiled import show
from shardnet.interop.sparse import sparse_all_reduce
from shardnet.interop.work import AnySourceWork, Facts, Finish, PendingWork, Works
from shardnet.uncompiled import uncompiled

Tensor = torch.Tensor


@uncompiled
class Collectives(dist.ProcessGroup):
    """The part of a group that carries tensors: `ShardnetProcessGroup` adds its identity and its end. Any thread.

    Everything returns at once with a torch Work; its `wait` raises shardnet's errors. `ranks` are the group's ranks as the default
    group numbers them, for errors; `ends` runs callbacks of futures.
    """

    def __init__(self, backend: Backend, ranks: list[int], timeout_s: float, ends: Ends) -> None:
        super().__init__(backend.rank, backend.world_size)
        self._backend = backend
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._ends = ends
        self._collectives = 0  # that were called
        self._coalesced: list[PendingWork] | None = None  # works that were begun between start_coalescing and end_coalescing

    # --- one tensor

    @overloaded(c10d.AllreduceOptions, [1], "op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _joined([self._all_reduce(each, opts) for each in tensors])

    def _all_reduce(self, tensor: Tensor, opts: Any) -> PendingWork:
        how = reduction(opts.reduceOp, tensor.dtype)
        if tensor.is_sparse:
            pending, finish = sparse_all_reduce(self._backend, tensor, how, self._timeout(opts))
            return self._work(pending, opts, [tensor], finish)
        check([tensor])
        flat = reducible(premultiplied(tensor, how.factor), how.op)
        out = reducible(tensor, how.op) if tensor.is_contiguous() else torch.empty_like(flat)
        pending = self._backend.all_reduce(flat, how.op, out=out, timeout_s=self._timeout(opts), label=how.label)
        return self._work(pending, opts, [tensor], how.finish(tensor, self.size(), in_place=tensor.is_contiguous()))

    @overloaded(c10d.BroadcastOptions, [1], "root timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        check(tensors)
        works = []
        for tensor in tensors:
            flat = movable(tensor)
            pending = self._backend.broadcast(flat, opts.rootRank, out=flat, timeout_s=self._timeout(opts))
            works.append(self._work(pending, opts, [tensor], None if tensor.is_contiguous() else partial(put, tensor)))
        return _joined(works)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingWork:
        check([output, input])
        _check_sizes("all_gather", output.numel(), self.size() * input.numel())
        _check_dtypes("all_gather", output, input)
        out = movable(output)
        pending = self._backend.all_gather(movable(input), out=out, timeout_s=self._timeout(opts))
        return self._work(pending, opts, [output], None if output.is_contiguous() else partial(put, output))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingWork:
        options = opts or c10d.ReduceScatterOptions()
        check([output, input])
        _check_sizes("reduce_scatter", input.numel(), self.size() * output.numel())
        _check_dtypes("reduce_scatter", output, input)
        how = reduction(options.reduceOp, input.dtype)
        flat, out = reducible(premultiplied(input, how.factor), how.op), reducible(output, how.op)
        pending = self._backend.reduce_scatter(flat, how.op, out=out, timeout_s=self._timeout(options), label=how.label)
        return self._work(pending, opts, [output], how.finish(output, self.size(), in_place=output.is_contiguous()))

    @overloaded(c10d.AllToAllOptions, [0, 0, 0, 0], "timeout")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] = (), input_split_sizes: Sequence[int] = (), *, opts: Any
    ) -> PendingWork:
        check([output, input])
        _check_dtypes("all_to_all", output, input)
        sends = self._rows(input, input_split_sizes, "input_split_sizes")
        receives = self._rows(output, output_split_sizes, "output_split_sizes")
        pending = self._exchange(movable(input), _scaled(sends, input), _scaled(receives, output), opts)
        return self._work(pending, opts, [output], partial(put, output))

    def _rows(self, tensor: Tensor, split: Sequence[int], what: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not split:
            if rows % self.size():
                raise UsageError(f"all_to_all cannot split {rows} rows evenly over {self.size()} ranks; pass {what}")
            return [rows // self.size()] * self.size()
        if sum(split) != rows:
            raise UsageError(f"{what} {list(split)} add up to {sum(split)}, but the tensor has {rows} rows")
        return list(split)

    # --- lists of tensors

    @overloaded(c10d.AllgatherOptions, [2, 1], "timeout")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        return _joined([self._all_gather(out, each, opts) for out, each in zip(outputs, inputs, strict=True)])

    def _all_gather(self, outputs: list[Tensor], input: Tensor, opts: Any) -> PendingWork:
        check([*outputs, input])
        flat = movable(input)
        sizes = [movable(each).numel() for each in outputs]
        if len(sizes) != self.size() or sizes[self.rank()] != flat.numel():
            own = outputs[self.rank()].numel() if self.rank() < len(outputs) else "no"
            raise UsageError(
                f"all_gather over {self.size()} ranks needs one output for each rank, and this rank's as large as its input; "
                f"got {len(sizes)} outputs, and this rank's has {own} elements for an input of {input.numel()}"
            )
        pending = self._backend.all_gather(flat, sizes=sizes, timeout_s=self._timeout(opts))
        return self._work(pending, opts, outputs, partial(put_all, outputs))

    @overloaded(c10d.ReduceScatterOptions, [1, 2], "op timeout")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        return _joined([self._reduce_scatter(out, parts, opts) for out, parts in zip(outputs, inputs, strict=True)])

    def _reduce_scatter(self, output: Tensor, parts: list[Tensor], opts: Any) -> PendingWork:
        check([output, *parts])
        if len(parts) != self.size():
            raise UsageError(f"reduce_scatter over {self.size()} ranks got {len(parts)} tensors; give one for each rank")
        how = reduction(opts.reduceOp, output.dtype)
        flats = [reducible(premultiplied(part, how.factor), how.op) for part in parts]
        sizes = [each.numel() for each in flats]
        pending = self._backend.reduce_scatter(torch.cat(flats), how.op, sizes=sizes, timeout_s=self._timeout(opts), label=how.label)
        return self._work(pending, opts, [output], how.finish(output, self.size(), in_place=False))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PendingWork:
        check([*outputs, *inputs])
        if not len(outputs) == len(inputs) == self.size():
            raise UsageError(
                f"all_to_all over {self.size()} ranks got {len(inputs)} tensors to send and {len(outputs)} to receive into; "
                "give one of each for each rank"
            )
        sends, receives = [movable(each) for each in inputs], [movable(each).numel() for each in outputs]
        pending = self._exchange(torch.cat(sends), [each.numel() for each in sends], receives, opts)
        return self._work(pending, opts, outputs, partial(put_all, outputs))

    @overloaded(c10d.GatherOptions, [2, 1], "root timeout")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PendingWork:
        here, parts = opts.rootRank == self.rank(), outputs[0] if outputs else []
        check([*parts, *inputs])
        if here and len(parts) != self.size():
            raise UsageError(
                f"gather over {self.size()} ranks got {len(parts)} tensors to gather into on its destination; give one for each rank"
            )
        flat = movable(inputs[0])
        if here:
            _check_own("gather", parts[self.rank()], inputs[0])
        pending = self._gather(flat, [movable(each).numel() for each in parts], opts)
        return self._work(pending, opts, parts, partial(put_all, parts) if here else None)

    @overloaded(c10d.GatherOptions, [0, 0], "root timeout")
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> PendingWork:
        """`output` matters only on the destination."""
        here = opts.rootRank == self.rank()
        check([output, input])
        _check_dtypes("gather", output, input)
        if here:
            _check_sizes("gather", output.numel(), self.size() * input.numel())
        flat = movable(input)
        pending = self._gather(flat, [flat.numel()] * self.size(), opts)
        return self._work(pending, opts, [output], partial(put, output) if here else None)

    def _gather(self, flat: Tensor, sizes: Sequence[int], opts: Any) -> Pending[Tensor]:
        """`sizes` are the sizes of all ranks' parts; they matter only on the destination."""
        sends = [flat.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        receives = list(sizes) if opts.rootRank == self.rank() else [0] * self.size()
        return self._exchange(flat, sends, receives, opts, self._rooted("gather to", opts.rootRank))

    @overloaded(c10d.ScatterOptions, [1, 2], "root timeout")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PendingWork:
        here, parts = opts.rootRank == self.rank(), inputs[0] if inputs else []
        check([*outputs, *parts])
        if here and len(parts) != self.size():
            raise UsageError(f"scatter over {self.size()} ranks got {len(parts)} tensors on its source; give one for each rank")
        flats, output = [movable(each) for each in parts], outputs[0]
        if here:
            _check_own("scatter", parts[self.rank()], output)
        sends = [each.numel() for each in flats] if here else [0] * self.size()
        receives = [movable(output).numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        label = self._rooted("scatter from", opts.rootRank)
        pending = self._exchange(torch.cat(flats) if here else movable(output)[:0], sends, receives, opts, label)
        return self._work(pending, opts, [output], partial(put, output))

    @overloaded(c10d.ReduceOptions, [1], "root op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> PendingWork:
        check(tensors)
        tensor, here = tensors[0], opts.rootRank == self.rank()
        how = reduction(opts.reduceOp, tensor.dtype)
        flat = reducible(premultiplied(tensor, how.factor), how.op)
        sizes = [flat.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        label = self._rooted(f"{how.label} reduce to".lstrip(), opts.rootRank)
        pending = self._backend.reduce_scatter(flat, how.op, sizes=sizes, timeout_s=self._timeout(opts), label=label)
        return self._work(pending, opts, [tensor], how.finish(tensor, self.size(), in_place=False) if here else None)

    def _exchange(self, flat: Tensor, sends: list[int], receives: list[int], opts: Any, label: str = "") -> Pending[Tensor]:
        """`label` names the operation that this all_to_all carries out: ranks must agree on it, and errors name it."""
        return self._backend.all_to_all(flat, send_sizes=sends, recv_sizes=receives, timeout_s=self._timeout(opts), label=label)

    def _rooted(self, what: str, root: int) -> str:
        """A label for an operation with a root, which the `Backend` carries out by another collective."""
        if not 0 <= root < self.size():
            raise InvalidRankError(root, self.size(), "root")
        return f"{what} {self._ranks[root]}"

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
        pending = self._backend.send(movable(tensor), to, tag=str(tag), timeout_s=self._timeout_s)
        return self._work(pending, None, [tensor])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PendingWork:
        check(tensors)
        tensor = tensors[0]
        pending = self._backend.recv(movable(tensor), source, tag=str(tag), timeout_s=self._timeout_s)
        return self._work(pending, None, [tensor], None if tensor.is_contiguous() else partial(put, tensor), source=source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PendingWork:
        check(tensors)
        tensor = tensors[0]
        flat, in_place = movable(tensor), tensor.device.type == "cpu" and tensor.is_contiguous()
        if not in_place:
            flat = torch.empty_like(flat, device="cpu")
        pending = self._backend.recv_any(flat, tag=str(tag), timeout_s=self._timeout_s)
        return self._work(pending, None, [tensor], None if in_place else lambda _: put(tensor, flat), kind=AnySourceWork)

    recvAnysource = recv_anysource  # noqa: N815 - torch's name

    @overloaded(c10d.BarrierOptions, [], "timeout")
    def barrier(self, opts: Any) -> PendingWork:
        return self._work(self._backend.barrier(timeout_s=self._timeout(opts)), opts, [])

    # --- old names (torch before 2.13)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- helpers

    def _work(
        self,
        pending: Pending[Any],
        opts: Any,
        outputs: Sequence[Tensor],
        finish: Finish | None = None,
        *,
        kind: type[PendingWork] = PendingWork,
        source: int | None = None,
    ) -> PendingWork:
        show(pending)
        self._collectives += pending.op_name not in ("send", "recv")
        facts = Facts(self._collectives, timedelta(seconds=self._timeout(opts)), source)
        work = kind(pending, outputs, self._ends, finish, facts)
        if self._coalesced is not None:
            self._coalesced.append(work)
        if c10d._allow_inflight_collective_as_graph_input():  # then `wait_tensor` waits for what is registered, as torch's own groups do
            for output in outputs:
                c10d._register_work(output, work)
        return work

    def _timeout(self, opts: Any) -> float:
        """Seconds: a call's own, or the group's."""
        given = None if opts is None else opts.timeout
        return self._timeout_s if given is None or given <= timedelta(0) else float(given.total_seconds())


def _joined(works: list[PendingWork]) -> dist.Work:
    return works[0] if len(works) == 1 else Works(works)


def _scaled(rows: Sequence[int], tensor: Tensor) -> list[int]:
    """The numbers of elements that a `Backend` sees for these numbers of rows."""
    width = tensor.shape[1:].numel() if tensor.dim() else 1
    per_element = movable(tensor[:0] if tensor.dim() else tensor.view(1)[:0]).itemsize
    return [count * width * tensor.itemsize // per_element for count in rows]


def _check_sizes(op: str, got: int, expected: int) -> None:
    if got != expected:
        raise UsageError(f"{op}: the tensor for all ranks together must have {expected} elements, got {got}")


def _check_own(op: str, part: Tensor, alone: Tensor) -> None:
    if part.numel() != alone.numel():
        raise UsageError(
            f"{op}: this rank's tensor in the list has {part.numel()} elements, but its single tensor {alone.numel()}; give both one size"
        )


def _check_dtypes(op: str, output: Tensor, input: Tensor) -> None:
    if output.dtype != input.dtype:
        raise UsageError(f"{op}: the output is {output.dtype}, but the input is {input.dtype}; give both the same dtype")
