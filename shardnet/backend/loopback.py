"""All ranks in one process: the same collectives as over a network, handed from rank to rank in memory."""

from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.errors import InvalidWorldSizeError
from shardnet.telemetry import Telemetry
from shardnet.transport.memory import MemoryMesh


class LoopbackBackend(MeshBackend):
    """One rank of a group that lives in this process; for tests, notebooks and a world of one."""

    @classmethod
    def create_group(cls, world_size: int, *, timeouts: Timeouts | None = None, limits: Limits | None = None) -> list["LoopbackBackend"]:
        """The backends of a new group, by rank. Use each from a thread or task of its own."""
        if world_size < 1:
            raise InvalidWorldSizeError(f"world size must be at least 1, got {world_size}")
        backends = []
        for mesh in MemoryMesh.connect(world_size):
            board = Switchboard(mesh, Telemetry(), limits or Limits())
            mesh.attach(board)
            backends.append(cls(board, board.world, timeouts or Timeouts()))
        return backends
