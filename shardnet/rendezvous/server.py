"""`RendezvousServer`: the rendezvous with its port and clock, as a process runs it, alone or beside a worker."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.pb import stats_pb2
from shardnet.rendezvous.events import JobStatus
from shardnet.rendezvous.membership import Registry, RendezvousLimits
from shardnet.rendezvous.service import RendezvousService
from shardnet.rendezvous.store import NoStore, Store
from shardnet.rendezvous.tasks import end_task
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.metrics_port import MetricsPort
from shardnet.transport.process_memory import ProcessMemory
from shardnet.version import VERSION

ROLE = "rendezvous"
SETTLE_S = 2.0  # longer than workers started together need to arrive, short enough that nobody minds the wait


class RendezvousServer:
    """The service, its clock and its port; an async context manager. Lives on the loop that enters it.

    Raises AddressError or PlaintextRefused when made, ListenError when entered. A running job goes on without it: workers
    need it only when workers come and go.
    """

    def __init__(
        self,
        listen: str,
        *,
        timeouts: Timeouts | None = None,
        settle_s: float = SETTLE_S,
        limits: RendezvousLimits | None = None,
        security: Security | None = None,
        store: Store | None = None,
        first_world_size: int = 0,
        reflection: bool = False,
        metrics: str = "",
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """settle_s  how long a job that has its minimum of workers, but not its maximum, waits for one more
        store     has the jobs from before, and saves all changes; closed with the server. The members of running jobs have `lost_s` from
                  the start to come back, and so have those of a job whose connections have all broken
        first_world_size  if not 0: with how many workers a job begins, whatever its minimum and maximum are
        reflection  see `Endpoint`
        metrics   host:port that serves statistics as Prometheus' text (`MetricsPort`); empty: nowhere
        on_done   called when the training of a job has ended with goodbyes and no job has a worker left, maybe more than once; a training
                  that was over before this started does not count
        """
        timeouts = timeouts or Timeouts()
        self._store = store or NoStore()
        registry = Registry(settle_s=settle_s, limits=limits, store=self._store, first_world_size=first_world_size)
        registry.restore(time.monotonic() + timeouts.lost_s)
        self._service = RendezvousService(registry, timeouts.lost_s, on_done=on_done)
        self._registry = registry
        self._endpoint = Endpoint(
            listen, limits=Limits(), timeouts=timeouts, snapshot=self._snapshot, security=security, leases=True, reflection=reflection
        )
        insecure = security is not None and security.insecure
        self._metrics = MetricsPort(metrics, self._endpoint.snapshot, insecure=insecure) if metrics else None
        self._endpoint.add(self._service.handlers())
        self._clock: asyncio.Task[None] | None = None  # owned: awaited by aclose
        self._started_s = time.monotonic()

    @property
    def address(self) -> str:
        """The bound `host:port`."""
        return self._endpoint.address

    @property
    def metrics(self) -> str:
        """The URL where statistics can be scraped; empty: nowhere."""
        return "" if self._metrics is None else self._metrics.url

    async def start(self) -> None:
        await self._endpoint.start()
        self._clock = asyncio.create_task(self._service.keep_time(), name="rendezvous clock")
        if self._metrics is not None:
            try:
                await self._metrics.start()
            except BaseException:
                await self.aclose()
                raise
        self._endpoint.set_serving(True)

    async def aclose(self) -> None:
        """End all leases, then the port. Running jobs go on. Safe to call twice."""
        self._service.close()
        clock, self._clock = self._clock, None
        async with AsyncExitStack() as last_first:
            last_first.callback(self._store.close)
            if clock is not None:
                last_first.push_async_callback(end_task, clock)
            last_first.push_async_callback(self._endpoint.aclose)
            if self._metrics is not None:
                last_first.push_async_callback(self._metrics.aclose)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def _snapshot(self) -> stats_pb2.SnapshotReply:
        memory = ProcessMemory.now()
        return stats_pb2.SnapshotReply(
            role=ROLE,
            version=VERSION,
            uptime_s=time.monotonic() - self._started_s,
            resident_bytes=memory.resident,
            memory=stats_pb2.Memory(peak_resident=memory.peak_resident, shared=memory.shared),
            metrics=self.metrics,
            jobs=map(_job, self._registry.status()),
        )


def _job(job: JobStatus) -> stats_pb2.Job:
    return stats_pb2.Job(
        name=job.job,
        state=job.state,
        epoch=job.epoch,
        joined=job.joined,
        min_world_size=job.min_world_size,
        max_world_size=job.max_world_size,
        absent=job.absent,
    )
