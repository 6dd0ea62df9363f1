"""`Ports`: ranks in one process that form one mesh after another, each in a new epoch, as after a loss."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from shardnet.backend.cluster import ClusterBackend
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.pb import stats_pb2
from shardnet.topology import Member, Topology
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService


class Ports:
    """One port for each rank; lives on shardnet's loop."""

    def __init__(
        self, services: Sequence[MeshService], members: Sequence[Member], security: Security, timeouts: Timeouts, limits: Limits
    ) -> None:
        self.epoch = 0
        self._services = services
        self._members = tuple(members)
        self._security = security
        self._timeouts = timeouts
        self._limits = limits

    async def form(self, *, shared_memory: bool = False) -> list[ClusterBackend]:
        """Form the next epoch and return its backends, by rank; the caller must give them to `dissolve`."""
        self.epoch += 1
        return await asyncio.gather(*(self._start(rank, shared_memory) for rank in range(len(self._members))))

    async def _start(self, rank: int, shared_memory: bool) -> ClusterBackend:
        topology = Topology(self.epoch, rank, self._members)
        mesh = GrpcMesh("job", topology, self._services[rank], self._security, self._timeouts, self._limits, shared_memory=shared_memory)
        return await ClusterBackend.start(mesh, topology, timeouts=self._timeouts, limits=self._limits)


async def dissolve(ranks: Sequence[ClusterBackend]) -> None:
    for rank in ranks:
        rank.abort()
    await asyncio.gather(*(rank.aclose() for rank in ranks))


def mesh_of(rank: ClusterBackend) -> GrpcMesh:
    mesh = rank._board.mesh
    assert isinstance(mesh, GrpcMesh)
    return mesh


@asynccontextmanager
async def ports(
    count: int, *, one_node: bool = False, security: Security | None = None, timeouts: Timeouts, limits: Limits
) -> AsyncIterator[Ports]:
    """Each rank is a node of its own, or with `one_node` all ranks are one node."""
    security = security or Security()
    identity = "" if security.credentials is None else security.credentials.identity.uri
    async with AsyncExitStack() as stack:
        services, members = [], []
        for rank in range(count):
            services.append(MeshService(timeouts))
            endpoint = Endpoint("127.0.0.1:0", limits=limits, timeouts=timeouts, snapshot=stats_pb2.SnapshotReply, security=security)
            endpoint.add_mesh(services[-1])
            await endpoint.start()
            stack.push_async_callback(endpoint.aclose, 0)
            place = (rank, 0) if one_node else (0, rank)
            members.append(Member(rank, *place, endpoint.address, f"node{place[1]}", f"w{rank}", identity))
        yield Ports(services, members, security, timeouts, limits)
