"""`World`: all processes of a torch job, connected, as one of them has it."""

import os
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardnet.backend.cluster import ClusterBackend
from shardnet.config import Timeouts
from shardnet.interop.meeting import meet
from shardnet.loop import LoopThread
from shardnet.rendezvous.identity import new_incarnation
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.training.settings import Settings
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService

JOB = "torch"  # where nobody gives it a name
T = TypeVar("T")
_NOWHERE = "127.0.0.1:1"  # where ranks meet that share a file: the address from which that is reached is loopback


class World:
    """One port, the connections to all other ranks, and a thread for futures; lives as long as torch's default group. Any thread."""

    def __init__(self, backend: ClusterBackend, endpoint: Endpoint, address: str) -> None:
        self.backend = backend
        self.address = address  # host:port at which others reach this rank
        self.ends = ThreadPoolExecutor(1, "shardnet-futures")  # see [Note: futures] in work.py
        self._endpoint = endpoint
        self._closed = False

    @classmethod
    def meet(cls, store: Store, rank: int, world_size: int, timeout_s: float) -> Self:
        """Find the others through torch's store, and connect to each. Blocks.

        Raises PeerLost or JoinTimeout, naming who is missing; ListenError; CredentialsError or PlaintextRefused where connections
        would not be protected as they must be.
        """
        return _wait(cls._meet(store, rank, world_size, timeout_s))

    @classmethod
    async def _meet(cls, store: Store, rank: int, world_size: int, timeout_s: float) -> Self:
        settings = Settings.from_environment(
            rendezvous=_address(store),
            job=os.environ.get("SHARDNET_JOB") or JOB,
            min_world_size=world_size,
            max_world_size=world_size,
            wished_rank=rank,
        )
        settings = replace(settings, timeouts=replace(Timeouts(), collective_s=timeout_s))
        security, telemetry, topologies = settings.security(), Telemetry(), list[Topology]()
        service = MeshService(settings.timeouts)
        endpoint = Endpoint(
            await settings.listen_address(),
            limits=settings.limits,
            timeouts=settings.timeouts,
            snapshot=lambda: worker_snapshot(telemetry, topologies[0] if topologies else None),
            security=security,
            reflection=settings.reflection,
        )
        endpoint.add_mesh(service)
        await endpoint.start()
        try:
            identity = "" if security.credentials is None else security.credentials.identity.uri
            address = await settings.public_address(endpoint.address)
            topology = await meet(store, rank, world_size, address, settings.node, new_incarnation(), identity, timeout_s)
            topologies.append(topology)
            mesh = GrpcMesh(
                *(settings.job, topology, service, security, settings.timeouts, settings.limits),
                shared_memory=settings.shared_memory,
                terms={"routing": settings.routing},
                on_broken=lambda: endpoint.set_serving(False),
            )
            backend = await ClusterBackend.start(
                mesh, topology, timeouts=settings.timeouts, limits=settings.limits, routing=settings.routing, telemetry=telemetry
            )
        except BaseException:
            await endpoint.aclose(0.0)
            raise
        endpoint.set_serving(mesh.is_whole)
        return cls(backend, endpoint, address)

    def close(self) -> None:
        """Finish what is under way, take leave of the other ranks, close the port. Safe to call again."""
        if not self._closed:
            self._closed = True
            _wait(self._close())
            self.ends.shutdown(wait=False)  # a callback may be what closes this

    def abort(self) -> None:
        """Fail what is under way, and close at once. Safe to call again."""
        self.backend.abort()
        self.close()

    async def _close(self) -> None:
        try:
            await self.backend.aclose()
        finally:
            await self._endpoint.aclose()


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on shardnet's loop, from any other thread. Ctrl-C cancels it."""
    running: Future[T] = LoopThread.shared().run(coroutine)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def _address(store: Store) -> str:
    """Where the store is; this machine's address towards it is where this rank can be reached."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{_bracketed(store.host)}:{store.port}" if isinstance(store, TCPStore) else _NOWHERE


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
