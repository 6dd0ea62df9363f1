"""All ranks in one process: the same collectives as over a network, handed from rank to rank in memory."""

from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.route import Nodes, Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.errors import InvalidWorldSizeError
from shardnet.telemetry import Telemetry
from shardnet.transport.memory import MemoryMesh


class LoopbackBackend(MeshBackend):
    """One rank of a group that lives in this process; for tests, notebooks and a world of one."""

    @classmethod
    def create_group(
        cls,
        world_size: int,
        *,
        ranks_per_node: int | None = None,
        routing: Routing = Routing.AUTO,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
    ) -> list["LoopbackBackend"]:
        """The backends of a new group, by rank. Use each from a thread or task of its own.

        `ranks_per_node` makes algorithms and node groups treat them as several nodes; default: all are one node.
        """
        if world_size < 1:
            raise InvalidWorldSizeError(f"world size must be at least 1, got {world_size}")
        nodes = nodes_of(world_size, ranks_per_node)
        timeouts, backends = timeouts or Timeouts(), []
        for mesh in MemoryMesh.connect(world_size):
            board = Switchboard(mesh, Telemetry(), limits or Limits(), timeouts.suspect_s, nodes, routing)
            mesh.attach(board)
            backends.append(cls(board, board.world, timeouts))
        return backends


def nodes_of(world_size: int, ranks_per_node: int | None) -> Nodes:
    """The ranks of each node; without `ranks_per_node`, all are on one node."""
    per_node = ranks_per_node or world_size
    return tuple(tuple(range(first, min(first + per_node, world_size))) for first in range(0, world_size, per_node))
