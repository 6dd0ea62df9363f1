"""The backend over gRPC: one rank per process, one port per rank."""

from typing import Self

import torch

from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.route import Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.loop import LoopThread
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.transport.base import Mesh


def _letters(mail: Mail | None) -> str:
    """What goes by letter, in words for a user."""
    if mail is None:
        return ""
    return ", through mailboxes in shared memory" if mail.lends else ", small ones through mailboxes in shared memory"


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
        """Connect a mesh to all of its peers. Raises PeerLost, naming the missing rank, after `connect_s`."""
        nodes = tuple(topology.node_ranks(node) for node in sorted({member.node_group for member in topology.members}))
        board = Switchboard(mesh, telemetry or Telemetry(), limits, timeouts.suspect_s, nodes, routing)
        try:
            await LoopThread.shared().run_here(mesh.start(board))
            await cls._correspond(board, topology.node_ranks(topology.me.node_group), timeouts)
        except BaseException:
            mesh.abort()
            raise
        board.telemetry.begin_epoch()
        board.telemetry.memory_peers, board.telemetry.borrowers = mesh.memory_peers, mesh.borrowers
        board.telemetry.routing = f"{board.world.route}{_letters(board.world.mail)}"
        return cls(board, board.world, timeouts)

    @classmethod
    async def _correspond(cls, board: Switchboard, node: tuple[int, ...], timeouts: Timeouts) -> None:
        """Find out which ranks of this node can read each other's mailboxes. All of them take part, whatever they can read themselves."""
        if len(node) == 1 or not board.mesh.shares_memory or not board.limits.letter_bytes:
            return
        ours = MeshBackend(board, board.group(node, "mailboxes", Telemetry()), timeouts)

        async def gather(row: list[bool]) -> list[list[bool]]:
            rows: list[list[bool]] = (await ours.all_gather(torch.tensor([row], device="cpu"), label="mailboxes")).tolist()
            return rows

        await ours.barrier(label="mailboxes")  # by its end, the memory that others offer on their streams is known here
        await board.correspond(node, gather)
