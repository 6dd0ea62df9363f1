"""The backend over gRPC: one rank a process, one port a rank."""

from typing import Self

from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.route import Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.loop import LoopThread
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.transport.base import Mesh


class ClusterBackend(MeshBackend):
    """One rank of a cluster whose members a rendezvous has placed."""

    @classmethod
    async def start(
        cls,
        mesh: Mesh,
        topology: Topology,
        *,
        timeouts: Timeouts,
        limits: Limits,
        routing: Routing = Routing.AUTO,
        telemetry: Telemetry | None = None,
    ) -> Self:
        """Connect a mesh to all of its peers. Raises PeerLost, naming who is missing, after `connect_s`."""
        nodes = tuple(topology.node_ranks(node) for node in sorted({member.node_group for member in topology.members}))
        board = Switchboard(mesh, telemetry or Telemetry(), limits, nodes, routing)
        try:
            await LoopThread.shared().run_here(mesh.start(board))
        except BaseException:
            mesh.abort()
            raise
        board.telemetry.memory_peers, board.telemetry.borrowers = mesh.memory_peers, mesh.borrowers
        board.telemetry.routing = str(board.world.route)
        return cls(board, board.world, timeouts)
