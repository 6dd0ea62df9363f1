"""`connect()`: from a process to a member of a cluster, and back."""

import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardnet import process
from shardnet.backend.base import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.backend.loopback import LoopbackBackend
from shardnet.errors import UsageError
from shardnet.fsdp import AsyncFSDP, Compression, MixedPrecision, ShardingStrategy
from shardnet.fsdp.initial_values import InitFunction
from shardnet.loop import LoopThread
from shardnet.performance import PerformanceRecorder, measure_link
from shardnet.rendezvous.client import join
from shardnet.rendezvous.identity import new_incarnation, node_identity
from shardnet.rendezvous.request import JoinRequest
from shardnet.telemetry import Progress, Telemetry
from shardnet.topology import Member, Topology
from shardnet.training.settings import Settings
from shardnet.training.snapshot import worker_snapshot
from shardnet.training.trace import gather_spans, write_trace
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService

log = logging.getLogger(__name__)


class Cluster:
    """This process's membership of one epoch of a cluster; made by `connect`."""

    def __init__(self, backend: Backend, topology: Topology) -> None:
        self.backend = backend
        self.topology = topology
        self._models: list[AsyncFSDP] = []
        self._recorders: list[PerformanceRecorder] = []

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def local_rank(self) -> int:
        return self.topology.me.local_rank

    @property
    def telemetry(self) -> Telemetry:
        return self.backend.telemetry

    async def shard(
        self,
        module: nn.Module,
        units: Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool] | None = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        intra_node_size: int | None = None,
        prefetch: int = 1,
        mixed_precision: MixedPrecision | None = None,
        reshard_after_forward: bool | int | None = None,
        compression: Compression | None = None,
        ignored_modules: Iterable[nn.Module] = (),
        param_init_fn: InitFunction | None = None,
        initial_state: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> AsyncFSDP:
        """Shard a module over the cluster; see `FSDP` for the arguments. All ranks must call it. Closed with the cluster."""
        model = await AsyncFSDP(
            module,
            self.backend,
            units=units,
            strategy=strategy,
            intra_node_size=intra_node_size,
            prefetch=prefetch,
            mixed_precision=mixed_precision,
            reshard_after_forward=reshard_after_forward,
            compression=compression,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            initial_state=initial_state,
            device=device,
        )
        self._models.append(model)
        return model

    async def record(self, model: AsyncFSDP | None, optimizer: torch.optim.Optimizer) -> PerformanceRecorder:
        """Measure how fast the network is, then watch a training; None for a model that is not sharded. All ranks must
        call it. Closed with the cluster; `shardnet.performance` has what makes the cluster's figures of the ranks'."""
        recorder = PerformanceRecorder(model or self.backend, optimizer, link_bytes_per_s=await measure_link(self.backend))
        self._recorders.append(recorder)
        return recorder

    async def mean(self, value: float, *, weight: float = 1.0) -> float:
        """The weighted mean of a number over ranks; all ranks must call it."""
        total, weights = (await self.backend.all_reduce(torch.tensor([value * weight, weight], dtype=torch.float64), label="mean")).tolist()
        return float(total / weights) if weights else float("nan")

    def report(
        self,
        *,
        step: int,
        total_steps: int = 0,
        loss: float = float("nan"),
        tokens_per_s: float = 0.0,
        exposed_share: float = 0.0,
        note: str = "",
    ) -> None:
        """Tell whoever watches (the launcher's bar, `shardnet status`) how far the training is. Local and cheap."""
        self.telemetry.step = step
        self.telemetry.progress = Progress(step, total_steps, loss, tokens_per_s, exposed_share, note)

    async def _close_models(self) -> None:
        for recorder in self._recorders:
            recorder.close()
        for model in self._models:
            await model.aclose()


@asynccontextmanager
async def connect(**settings: Any) -> AsyncIterator[Cluster]:
    """Join the cluster that the environment names (`shardnet run` sets it), or be a world of one where there is none.

    Any field of `Settings` may be given instead: `connect(rendezvous="10.0.0.1:7000", min_world_size=4, …)`.
    Entering waits until the world is complete; raises `UsageError` for a setting that makes no sense, a `RendezvousError`
    if joining fails and `PeerLost` if a peer cannot be reached. Leaving says goodbye to the peers; leaving by an exception
    does not, so that they fail at once, too. A second connect in a process is a member of its own, with a port of its own, and under the
    same certificate with a `local_rank` of its own.
    """
    chosen = Settings.from_environment(None, **settings)
    trace = _trace_file(chosen)
    process.tune()
    async with AsyncExitStack() as stack:
        enter = _join_cluster if chosen.rendezvous else _alone
        backend, topology = await enter(chosen, stack)
        cluster = Cluster(backend, topology)
        try:
            yield cluster
            if trace is not None:
                await _write_trace(cluster, trace)
        except BaseException:
            backend.abort()  # first, so that no compute thread waits for a collective any more
            raise
        finally:
            await cluster._close_models()


async def _end(backend: Backend, error: BaseException | None) -> None:
    """Say goodbye and close; after an error without a goodbye."""
    if error is not None:
        backend.abort()
    await backend.aclose()


def _trace_file(settings: Settings) -> Path | None:
    """Where the trace goes. Its folder is made now: at the end of a long run it is too late to learn that it cannot be."""
    if not settings.trace:
        return None
    path = Path(settings.trace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise UsageError(f"cannot write a trace to {path}: {error.strerror}; choose another place for --trace (SHARDNET_TRACE)") from error
    return path


async def _write_trace(cluster: Cluster, path: Path) -> None:
    spans = await gather_spans(cluster.backend, cluster.topology.me.address)
    if cluster.rank == 0:
        write_trace(path, spans)
        log.info("timeline of %d ranks for https://ui.perfetto.dev: %s", len(spans), path)


async def _alone(settings: Settings, stack: AsyncExitStack) -> tuple[Backend, Topology]:
    """A world of one: no network, the same API."""
    backend = LoopbackBackend.create_group(1, timeouts=settings.timeouts, limits=settings.limits)[0]
    stack.push_async_exit(lambda kind, error, trace: _end(backend, error))
    backend.telemetry.tracing = bool(settings.trace)
    member = Member(0, 0, 0, "127.0.0.1:0", node_identity(settings.node), new_incarnation())
    return backend, Topology(epoch=1, rank=0, members=(member,))


async def _join_cluster(settings: Settings, stack: AsyncExitStack) -> tuple[Backend, Topology]:
    """Listen, join, connect to every peer. What is opened is closed by `stack`, in the opposite order."""
    loop, telemetry = LoopThread.shared(), Telemetry(tracing=bool(settings.trace))
    security = settings.security()
    topology: Topology | None = None
    endpoint = Endpoint(
        await settings.listen_address(),
        limits=settings.limits,
        timeouts=settings.timeouts,
        snapshot=lambda: worker_snapshot(telemetry, topology),
        security=security,
    )
    service = MeshService(settings.timeouts, settings.limits)
    endpoint.add_mesh(service)
    await loop.run_here(endpoint.start())
    stack.push_async_callback(lambda: loop.run_here(endpoint.aclose()))

    def on_lost(rank: int, reason: str, left: bool) -> None:
        # Only a hint: the rendezvous may have lost a worker whose peers still reach it. The mesh sees for itself, sooner for it.
        if service.mesh is not None:
            service.mesh.suspect(rank)
        log.info("[rank %d] the rendezvous says that rank %d is gone (%s)", topology.rank if topology else -1, rank, reason)

    request = JoinRequest(
        job=settings.job,
        incarnation=new_incarnation(),
        address=await settings.public_address(endpoint.address),
        node=node_identity(settings.node),
        min_world_size=settings.min_world_size,
        max_world_size=settings.max_world_size,
        local_rank_hint=settings.local_rank,
    )
    membership = join(settings.rendezvous, request, timeouts=settings.timeouts, on_lost=on_lost, security=security)
    await loop.run_here(membership.__aenter__())
    stack.push_async_exit(lambda kind, error, trace: loop.run_here(membership.__aexit__(kind, error, trace)))
    topology = membership.topology
    mesh = GrpcMesh(
        *(settings.job, topology, service, security, settings.timeouts, settings.limits),
        shared_memory=settings.shared_memory,
        terms={"routing": settings.routing},
    )
    backend = await ClusterBackend.start(
        mesh, topology, timeouts=settings.timeouts, limits=settings.limits, routing=settings.routing, telemetry=telemetry
    )
    stack.push_async_exit(lambda kind, error, trace: _end(backend, error))  # at once: what follows may fail
    await loop.run_here(endpoint.set_serving(True))
    if settings.report_file:
        with Path(settings.report_file).open("a") as report:  # noqa: ASYNC230 - one line to a local file
            report.write(f"{topology.me.address} {topology.rank} {topology.world_size}\n")
    return backend, topology
