"""`TorchBackend`: shardnet controls the collectives, and a torch process group moves their data.

[Note: torch inside] A collective is handled as on the mesh: numbered, announced, compared, timed out, and failed for all; the mesh notices
dead ranks. Only when all ranks have agreed (agreement.py) is its data launched on a torch process group, in the order of the sequence
numbers (line.py), on a thread that no other thread waits for. Torch moves bytes. Sums are computed here, in the order of [Note: reduction
order], so they have the same bits as on the mesh: parts are exchanged and added, which costs as many bytes as a ring.

Small collectives of CPU tensors go over the mesh, which takes one step. So do barriers, and all sends and receives: torch pairs those of
two ranks in the order in which they are launched, while shardnet matches them by tag, each pair independently of all others.

A torch process group cannot go on after a failure. If a collective fails after its rank has agreed, the process group is thrown away.
This happens on all ranks, since a failure is told to all; collectives called on this group after that fail at once. The backend's other
groups go on.
"""

import asyncio
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from shardnet.backend.agreement import agree, confirm
from shardnet.backend.arguments import disagree_all_to_all
from shardnet.backend.base import Backend, Tensor
from shardnet.backend.line import Place
from shardnet.backend.mesh_backend import MeshBackend, SubBackend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.backend.stage import Journey, Stage, Work
from shardnet.backend.stages import Stages
from shardnet.backend.streams import Event
from shardnet.backend.tensors import flat, in_bytes, put, raw
from shardnet.backend.torch_group import TorchGroup
from shardnet.backend.torch_source import TorchSource
from shardnet.backend.torch_sums import combined, finish
from shardnet.collectives import plans
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Call, Operation
from shardnet.collectives.reduction import ReduceOp, Reduction
from shardnet.collectives.route import Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Timeouts
from shardnet.errors import CollectiveError, CollectiveMismatch, ShardnetError, StateError

# How long to wait for the mesh's word of which rank is gone or late: torch's connections may break, or a rank may give up making them,
# before that word comes, and it says more.
_VERDICT_S = 0.8
T = TypeVar("T")
Steps = Sequence[tuple[Stage, Work]]  # of a collective, one after the other


class TorchBackend(MeshBackend):
    """One group of ranks on a switchboard. A torch process group of the same ranks carries its large data."""

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts, source: TorchSource) -> None:
        """`source` must reach all ranks of the group."""
        super().__init__(board, group, timeouts)
        self._heritage = (source,)
        self._source = source
        self._stages = Stages(board, group)
        weakref.finalize(self, self._stages.release).atexit = False
        self._torch = self._torch_group("whole", range(group.size))
        self._whole = self._stages.add("whole", self._torch)

    def subgroup(self, members: Sequence[int]) -> SubBackend:
        return TorchSubBackend(self, members)

    def all_gather_on_node(
        self, tensor: Tensor, *, sizes: Sequence[int] | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[NodeBuffer]:
        return Backend.all_gather_on_node(self, tensor, sizes=sizes, timeout_s=timeout_s, label=label)

    def broadcast_on_node(self, tensor: Tensor, root: int, *, timeout_s: float | None = None, label: str = "") -> Pending[NodeBuffer]:
        return Backend.broadcast_on_node(self, tensor, root, timeout_s=timeout_s, label=label)

    @property
    def shares_node(self) -> bool:
        return False

    @property
    def lends_pieces(self) -> bool:
        return False

    # --- collectives

    def _all_reduce(self, call: Call, source: Tensor, result: Tensor, op: ReduceOp) -> Pending[Tensor]:
        bounds = plans.balanced_bounds(source.numel(), self.world_size)
        if self._stays_on_mesh((source, result), bounds, source.nbytes):
            return super()._all_reduce(call, source, result, op)

        def work(_: Journey) -> tuple[()]:
            self._scatter(source, flat(result)[slice(*bounds[self.rank])], bounds, op)
            self._torch.gather(raw(result), in_bytes(bounds, result))
            return ()

        return self._carry(call, Journey(source.device, source, result), [(self._whole, work)], result)

    def _broadcast(self, call: Call, result: Tensor, root: int) -> Pending[Tensor]:
        if self._stays_on_mesh((result,), [(0, result.numel())], result.nbytes):
            return super()._broadcast(call, result, root)

        def work(_: Journey) -> tuple[()]:
            self._torch.broadcast(raw(result), root)
            return ()

        return self._carry(call, Journey(result.device, result), [(self._whole, work)], result)

    def _all_gather(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, after: Event | None) -> Pending[Tensor]:
        if self._stays_on_mesh((source, result), bounds, max(end - start for start, end in bounds) * result.itemsize):
            return super()._all_gather(call, source, result, bounds, after)

        def work(_: Journey) -> tuple[()]:
            put(source, flat(result)[slice(*bounds[self.rank])])
            self._torch.gather(raw(result), in_bytes(bounds, result))
            return ()

        return self._carry(call, Journey(source.device, source, result, after=after), [(self._whole, work)], result)

    def _reduce_scatter(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, op: ReduceOp) -> Pending[Tensor]:
        if self._stays_on_mesh((source, result), bounds, source.nbytes):
            return super()._reduce_scatter(call, source, result, bounds, op)

        def work(_: Journey) -> tuple[()]:
            self._scatter(source, flat(result), bounds, op)
            return ()

        return self._carry(call, Journey(source.device, source, result), [(self._whole, work)], result)

    def _all_to_all(
        self, call: Call, source: Tensor, result: Tensor, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool
    ) -> Pending[Tensor]:
        if self._stays_on_mesh((source,), send_bounds if even else None, source.nbytes):
            return super()._all_to_all(call, source, result, send_bounds, recv_bounds, even=even)

        def work(_: Journey) -> tuple[()]:
            sends, receives = in_bytes(send_bounds, source), in_bytes(recv_bounds, result)
            self._torch.exchange(raw(source), sends, raw(result), receives)
            return ()

        sizes = None if even else (in_bytes(send_bounds, source), in_bytes(recv_bounds, result))
        return self._carry(call, Journey(source.device, source, result), [(self._whole, work)], result, sizes)

    # --- how

    def _torch_group(self, purpose: str, ranks: Sequence[int]) -> TorchGroup:
        """A process group of these ranks of this group, which are ascending and include this rank."""
        members = [self._group.members[rank] for rank in ranks]
        near = next(node for node in self._board.nodes if self._board.mesh.rank in node)
        name = f"{self._group.epoch} {self._group.id:x} {purpose} of {members[0]}"  # other nodes may use the same store
        return TorchGroup(self._source, name, self.rank, ranks, members, near)

    def _stays_on_mesh(self, tensors: Sequence[Tensor], bounds: Bounds | None, letter_bytes: int) -> bool:
        """Whether a collective is small, or on a device that the engine does not carry; the same on all ranks. `bounds` is None if each
        rank knows only its own."""
        if any(tensor.device.type not in self._source.devices for tensor in tensors):
            return True
        if tensors[0].device.type != "cpu" or bounds is None:
            return False
        return self._mail(letter_bytes) is not None or self._is_small(tensors[0], bounds)

    def _is_small(self, tensor: Tensor, bounds: Bounds) -> bool:
        return plans.is_small(self._group, bounds, tensor.itemsize)

    def _scatter(self, source: Tensor, out: Tensor, bounds: Bounds, op: ReduceOp) -> None:
        """Exchange the parts and sum up this rank's block into `out`, which is flat and may overlap `source`."""
        start, end = bounds[self.rank]
        parts = source.new_empty(self.world_size, end - start)
        places = plans.bounds_of([parts[0].nbytes] * self.world_size)
        self._torch.exchange(raw(source), in_bytes(bounds, source), raw(parts), places)
        reduction = Reduction(op, source.dtype, self.world_size)
        order = self._order(reduction, range(self.world_size), self.rank, in_order=self._is_small(source, bounds))
        finish(reduction, combined(reduction, [parts[rank] for rank in order]), out)

    def _order(self, reduction: Reduction, ranks: Sequence[int], own: int, *, in_order: bool) -> list[int]:
        """The order in which the parts of these ranks are added up for `own`, one of them: the same as in Hierarchical and Exchange."""
        if in_order or reduction.widens or self._board.routing is Routing.RANK_ORDER:
            return list(ranks)
        return [*(rank for rank in ranks if rank > own), *(rank for rank in ranks if rank <= own)]

    def _carry(
        self, call: Call, journey: Journey, steps: Steps, result: Tensor, sizes: tuple[Bounds, Bounds] | None = None
    ) -> Pending[Tensor]:
        """Begin a collective whose data goes through these steps. `sizes` bound the bytes for and from each rank, if the signature does
        not settle them."""

        async def run(op: Operation) -> None:
            self._stages.enter(op)
            places = [stage.line.place() for stage, _ in steps]  # see [Note: a place in the line]
            try:
                if sizes is None:
                    await agree(op)
                else:
                    sends, expects = ([end - start for start, end in bounds] for bounds in sizes)
                    await agree(op, sends, expects, disagree_all_to_all)
                await self._launch(op, journey, list(zip(places, steps, strict=True)))
                self._stages.passed(op)
            finally:
                journey.forget()
                self._stages.leave(op)
                for place in places:
                    place.give_up()

        return Pending(self._group.operations.begin(call, run, result), call.op, journey.arrive)

    async def _launch(self, op: Operation, journey: Journey, steps: Sequence[tuple[Place, tuple[Stage, Work]]]) -> None:
        """Launch a collective. From here on others may have launched it: if it fails, no more can be launched. See [Note: agreement]."""
        launched = False
        try:
            await confirm(op)
            launched = True
            for index, (place, (stage, work)) in enumerate(steps):
                if index and stage.group is not None:
                    await confirm(op, stage.group.peers)  # see [Note: nothing waits in a launch]
                await place.run(journey.job(stage, work, op))
                await _settled(journey.over_mesh)
        except BaseException as error:
            if launched or not isinstance(op.error or error, CollectiveMismatch):  # its finder never confirmed, so no rank has launched
                await self._throw_away(op, error)
            if _leaves_open_why(error):
                raise CollectiveError(f"{self._board.where()} {op.name} of {self._group.party.title} failed in torch: {error}") from None
            raise

    async def _throw_away(self, op: Operation, error: BaseException) -> None:
        """Throw away the process groups, with all that is under way on them: at once, unless another rank may be about to say why."""
        try:
            if _leaves_open_why(error):
                await asyncio.sleep(_VERDICT_S)
        finally:
            self._stages.break_up(f"{op.name} failed", by=op)


class TorchSubBackend(SubBackend, TorchBackend):
    """Some ranks of a parent backend, with a process group of their own."""


def _leaves_open_why(error: BaseException) -> bool:
    """Whether an error comes from torch, or only says that another rank has given up: then the mesh may have yet to say why."""
    return isinstance(error, StateError) or (isinstance(error, RuntimeError) and not isinstance(error, ShardnetError))


async def _settled(over_mesh: Sequence[Pending[Any]]) -> None:
    """Wait until these have ended, well or not, without making a stream wait for them: `Journey.take` does that."""
    for pending in [each.quietly() for each in over_mesh]:
        ended = asyncio.Event()
        pending.add_done_callback(partial(_wake, asyncio.get_running_loop(), ended))
        await ended.wait()


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, _: Pending[Any]) -> None:
    loop.call_soon_threadsafe(ended.set)
