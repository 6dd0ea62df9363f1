"""`HybridBackend`: a torch process group inside each node, our own mesh across nodes.

[Note: stages of a hybrid] A collective goes over two stages, each with a line and, on a GPU, a stream of its own. At `node` the ranks of a
node sum up their parts, and at the end give each other the data that has come from other nodes; `across` begins the transfers along the
rails (rails.py) to and from other nodes. Several collectives may be on their way across at once. The stages begin these transfers, so in
the same order on all ranks, and each transfer bears the name of its collective: it cannot be taken for that of another one.

[Note: nothing waits in a launch] On a GPU, an operation that the engine launches waits there for the other ranks of the node. Until it
ends, some CUDA calls block, and with them the process: pinning memory, loading a kernel (CUDA's guide, "implicit synchronization" and "lazy
loading"). So nothing may be launched that waits for more than the launches of the other ranks; otherwise two ranks could wait for each
other. All ranks of a node launch everything in one order, that of the line of `node`, in which a collective's two turns are next to each
other. At the second turn they first tell each other that the data due from other nodes has arrived.

Only the ranks, their nodes and the size of the data fix the order of a sum. Inside a node it is the order of [Note: torch inside], as the
sum is taken there; across nodes it is that of the mesh for a rail, on which every node is one rank. Sums of 16-bit floats stay
float32 between the two and are rounded once. Each block is summed up by one rank and then copied, so all ranks end with the same bits.
"""

from collections.abc import Sequence
from functools import partial

import torch

from shardnet.backend.base import Tensor
from shardnet.backend.crossing import Gather, Scatter, terms
from shardnet.backend.mesh_backend import MeshBackend, SubBackend
from shardnet.backend.pending import Pending
from shardnet.backend.rails import Rails
from shardnet.backend.stage import Journey
from shardnet.backend.streams import Event
from shardnet.backend.tensors import flat, in_bytes, raw
from shardnet.backend.torch_backend import TorchBackend
from shardnet.backend.torch_source import TorchSource, choose_gpu
from shardnet.collectives import plans
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Call
from shardnet.collectives.reduction import ReduceOp, Reduction
from shardnet.collectives.route import Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import NodeEngine, Timeouts
from shardnet.errors import UsageError


class HybridBackend(TorchBackend):
    """One group of ranks on a switchboard. A torch process group carries its large data inside each node, and the mesh carries it across.

    If every node has one rank, everything goes over the mesh. With a single node this behaves like a TorchBackend.
    """

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts, source: TorchSource) -> None:
        """`source` must reach all ranks of the group that are on this rank's node. Raises UsageError unless the mesh routes by nodes."""
        if board.routing is not Routing.AUTO:
            raise UsageError(f"routing must be 'auto' for a node_engine other than shardnet, got {str(board.routing)!r}")
        super().__init__(board, group, timeouts, source)
        self._rails = Rails.of(group.nodes, group.rank)
        self._node_group = self._torch_group("node", self._rails.node)
        self._node = self._stages.add("node", self._node_group)
        self._across = self._stages.add("across")
        self._meshes: dict[str, MeshBackend] = {}

    def subgroup(self, members: Sequence[int]) -> SubBackend:
        return HybridSubBackend(self, members)

    # --- collectives

    def _all_reduce(self, call: Call, source: Tensor, result: Tensor, op: ReduceOp) -> Pending[Tensor]:
        bounds = plans.balanced_bounds(source.numel(), self.world_size)
        if self._is_plain((source, result), bounds, source.nbytes):
            return super()._all_reduce(call, source, result, op)
        own = flat(result)[slice(*bounds[self.rank])]
        scatter, gather = self._scattering(source, own, bounds, op), self._gathering(own, result, bounds)

        def turn(journey: Journey) -> list[Pending[Tensor]]:
            scatter.finish(journey)
            return gather.begin(journey)

        steps = [(self._node, scatter.begin), (self._across, turn), (self._node, gather.finish)]
        return self._carry(call, Journey(source.device, source, result), steps, result)

    def _broadcast(self, call: Call, result: Tensor, root: int) -> Pending[Tensor]:
        if self._is_plain((result,), [(0, result.numel())], result.nbytes):
            return super()._broadcast(call, result, root)
        rail = next(node.index(root) for node in self._rails.nodes if root in node)
        along: list[Pending[Tensor]] = []

        def begin(journey: Journey) -> list[Pending[Tensor]]:
            if rail in self._rails.mine:
                source = self._rails.servers(rail).index(root)
                along.append(self._rail("gather", rail).broadcast(flat(result), source, out=flat(result), **terms(journey)))
            return along

        def spread(journey: Journey) -> tuple[()]:
            for pending in along:
                journey.take(pending)
            self._node_group.broadcast(raw(result), rail % len(self._rails.node))
            return ()

        return self._carry(call, Journey(result.device, result), [(self._across, begin), (self._node, spread)], result)

    def _all_gather(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, after: Event | None) -> Pending[Tensor]:
        if self._is_plain((source, result), bounds, max(end - start for start, end in bounds) * result.itemsize):
            return super()._all_gather(call, source, result, bounds, after)
        gather = self._gathering(source, result, bounds)
        steps = [(self._across, gather.begin), (self._node, gather.finish)]
        return self._carry(call, Journey(source.device, source, result, after=after), steps, result)

    def _reduce_scatter(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, op: ReduceOp) -> Pending[Tensor]:
        if self._is_plain((source, result), bounds, source.nbytes):
            return super()._reduce_scatter(call, source, result, bounds, op)
        scatter = self._scattering(source, flat(result), bounds, op)
        steps = [(self._node, scatter.begin), (self._across, scatter.finish)]
        return self._carry(call, Journey(source.device, source, result), steps, result)

    def _all_to_all(
        self, call: Call, source: Tensor, result: Tensor, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool
    ) -> Pending[Tensor]:
        if self._is_plain((source,), send_bounds if even else None, source.nbytes):
            return super()._all_to_all(call, source, result, send_bounds, recv_bounds, even=even)
        far, both = [rank for rank in range(self.world_size) if rank not in self._rails.node], (send_bounds, recv_bounds)
        along: list[Pending[Tensor]] = []

        def begin(journey: Journey) -> list[Pending[Tensor]]:
            outgoing = journey.keep(torch.cat([flat(source)[slice(*send_bounds[rank])] for rank in far]))
            sends, receives = ([_length(bounds, rank) if rank in far else 0 for rank in range(self.world_size)] for bounds in both)
            along.append(
                self._mesh("across", range(self.world_size)).all_to_all(outgoing, send_sizes=sends, recv_sizes=receives, **terms(journey))
            )
            return along

        def join(journey: Journey) -> tuple[()]:
            near_sends, near_places = ([bounds[rank] for rank in self._rails.node] for bounds in both)
            self._node_group.exchange(raw(source), in_bytes(near_sends, source), raw(result), in_bytes(near_places, result))
            came = torch.split(journey.take(along[0]), [_length(recv_bounds, rank) for rank in far])
            for rank, block in zip(far, came, strict=True):
                flat(result)[slice(*recv_bounds[rank])].copy_(block)
            return ()

        sizes = None if even else (in_bytes(send_bounds, source), in_bytes(recv_bounds, result))
        steps = [(self._across, begin), (self._node, join)]
        return self._carry(call, Journey(source.device, source, result), steps, result, sizes)

    # --- how

    def _is_plain(self, tensors: Sequence[Tensor], bounds: Bounds | None, letter_bytes: int) -> bool:
        """Whether a collective does not need both stages: it stays on the mesh, or all ranks are on one node."""
        return len(self._rails.nodes) == 1 or self._stays_on_mesh(tensors, bounds, letter_bytes)

    def _stays_on_mesh(self, tensors: Sequence[Tensor], bounds: Bounds | None, letter_bytes: int) -> bool:
        return len(self._rails.nodes) == self.world_size or super()._stays_on_mesh(tensors, bounds, letter_bytes)

    def _scattering(self, source: Tensor, out: Tensor, bounds: Bounds, op: ReduceOp) -> Scatter:
        small, members = self._is_small(source, bounds), range(len(self._rails.node))

        def order(reduction: Reduction) -> list[int]:
            return self._order(reduction, members, self._rails.member, in_order=small)

        mesh = partial(self._rail, "scatter")
        return Scatter(self._rails, self._node_group, mesh, source, out, bounds, Reduction(op, source.dtype, self.world_size), order)

    def _gathering(self, source: Tensor, result: Tensor, bounds: Bounds) -> Gather:
        return Gather(self._rails, self._node_group, partial(self._rail, "gather"), source, result, bounds, self.rank)

    def _rail(self, purpose: str, rail: int) -> MeshBackend:
        """The mesh along a rail, a separate one for each purpose: the collectives of one purpose begin in the same order on all ranks."""
        return self._mesh(f"{purpose} along rail {rail}", self._rails.servers(rail))

    def _mesh(self, purpose: str, ranks: Sequence[int]) -> MeshBackend:
        """A group of these ranks, made when the line of a stage first needs it; no other group has its purpose."""
        if purpose not in self._meshes:
            members = tuple(self._group.members[rank] for rank in ranks)
            group = self._board.group(members, f"{purpose} of {self._group.id:x}")
            self._meshes[purpose] = MeshBackend(self._board, group, self._timeouts)
        return self._meshes[purpose]


async def with_engine(world: MeshBackend, engine: NodeEngine, local_rank: int) -> MeshBackend:
    """The backend of a world with that engine inside its nodes. All ranks call this with the same engine, before anything else.

    `local_rank` numbers the ranks of a machine. Aborts the world if making the backend fails.
    """
    if engine is NodeEngine.SHARDNET:
        return world
    try:
        if engine is NodeEngine.NCCL:
            choose_gpu(local_rank)
        hybrid = HybridBackend(world._board, world._group, world._timeouts, await TorchSource.on_node(world, engine))
    except BaseException:
        world.abort()
        raise
    world.telemetry.routing += f", inside nodes by {engine}"
    return hybrid


class HybridSubBackend(SubBackend, HybridBackend):
    """Some ranks of a parent backend, with process groups and rails of their own."""


def _length(bounds: Bounds, rank: int) -> int:
    start, end = bounds[rank]
    return end - start
