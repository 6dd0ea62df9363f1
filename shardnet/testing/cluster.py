"""A cluster in one process: every rank has its own port, streams and backend, as it would have in its own process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from shardnet.backend.base import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.backend.loopback import LoopbackBackend, nodes_of
from shardnet.collectives.route import Routing
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.loop import LoopThread
from shardnet.pb import stats_pb2
from shardnet.telemetry import Telemetry
from shardnet.testing.jitter import JitterMesh
from shardnet.topology import Member, Topology
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService

B = TypeVar("B", bound=Backend)


@asynccontextmanager
async def local_cluster(
    world_size: int,
    *,
    ranks_per_node: int | None = None,
    routing: Routing = Routing.AUTO,
    shared_memory: bool | Callable[[int], bool] = True,
    lending: bool = True,
    security: Security | None = None,
    timeouts: Timeouts | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[list[ClusterBackend]]:
    """Backends over gRPC on loopback ports, by rank. They are closed on leaving, or aborted if an error is the reason.

    `shared_memory` may be a function of the rank. All ranks have the same `security`.
    """
    security = security or Security()
    identity = "" if security.credentials is None else security.credentials.identity.uri
    shares = shared_memory if callable(shared_memory) else lambda _: shared_memory
    timeouts, limits = timeouts or Timeouts.for_tests(), limits or Limits()
    loop = LoopThread.shared()
    per_node = ranks_per_node or world_size
    async with AsyncExitStack() as stack:
        services = [MeshService(timeouts) for _ in range(world_size)]
        members = []
        for rank, service in enumerate(services):
            endpoint = Endpoint("127.0.0.1:0", limits=limits, timeouts=timeouts, snapshot=stats_pb2.SnapshotReply, security=security)
            endpoint.add_mesh(service)
            await loop.run_here(endpoint.start())
            stack.push_async_callback(_close, loop, endpoint)
            node = rank // per_node
            members.append(Member(rank, rank % per_node, node, endpoint.address, f"node{node}", f"worker{rank}", identity))
        topologies = [Topology(epoch=1, rank=rank, members=tuple(members)) for rank in range(world_size)]
        meshes = [
            GrpcMesh("test", topology, service, security, timeouts, limits, shared_memory=shares(topology.rank), lending=lending)
            for topology, service in zip(topologies, services, strict=True)
        ]
        starting = (
            ClusterBackend.start(mesh, topology, timeouts=timeouts, limits=limits, routing=routing)
            for mesh, topology in zip(meshes, topologies, strict=True)
        )
        backends = await asyncio.gather(*starting)
        async with _open(backends):
            yield backends


@asynccontextmanager
async def loopback_cluster(
    world_size: int,
    *,
    ranks_per_node: int | None = None,
    routing: Routing = Routing.AUTO,
    timeouts: Timeouts | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[list[LoopbackBackend]]:
    """The same without a network: see `LoopbackBackend`."""
    timeouts = timeouts or Timeouts.for_tests()
    made = LoopbackBackend.create_group(world_size, ranks_per_node=ranks_per_node, routing=routing, timeouts=timeouts, limits=limits)
    async with _open(made) as backends:
        yield backends


@asynccontextmanager
async def jitter_cluster(
    world_size: int,
    seed: int,
    *,
    ranks_per_node: int | None = None,
    timeouts: Timeouts | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[list[LoopbackBackend]]:
    """Loopback with random delays, which follow from the seed and the order of the chunks: see `JitterMesh`."""
    timeouts, backends = timeouts or Timeouts.for_tests(), []
    for mesh in JitterMesh.connect(world_size):
        mesh.random.seed(seed * world_size + mesh.rank)
        board = Switchboard(mesh, Telemetry(), limits or Limits(), timeouts.suspect_s, nodes_of(world_size, ranks_per_node))
        mesh.attach(board)
        backends.append(LoopbackBackend(board, board.world, timeouts))
    async with _open(backends):
        yield backends


@asynccontextmanager
async def _open(backends: list[B]) -> AsyncIterator[list[B]]:
    try:
        yield backends
    except BaseException:
        for backend in backends:
            backend.abort()  # closing would wait for collectives that cannot end any more
        raise
    finally:
        await asyncio.gather(*(backend.aclose() for backend in backends))


async def _close(loop: LoopThread, endpoint: Endpoint) -> None:
    await loop.run_here(endpoint.aclose(0))
