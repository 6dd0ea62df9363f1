"""`connect()`: makes a process a member of a cluster, and ends the membership."""

import asyncio
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, Unpack
from weakref import WeakSet

import torch
from torch import nn

from shardnet import process
from shardnet.backend.base import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import AsyncFSDP
from shardnet.fsdp.options import ShardingOptions
from shardnet.fsdp.placement import UnitChoice
from shardnet.performance import PerformanceRecorder, measure_link
from shardnet.rendezvous.client import Membership
from shardnet.settings import Settings
from shardnet.telemetry import Progress, Telemetry
from shardnet.topology import Topology
from shardnet.training.black_box import BlackBox
from shardnet.training.diagnosis import Diagnosis
from shardnet.training.doorbell import answering
from shardnet.training.last_words import LastWords
from shardnet.training.seat import Seat, end_membership
from shardnet.training.station import Station, open_station, take_seat
from shardnet.training.trace import gather_spans, write_trace
from shardnet.training.tracking import Callback, Record, Tracker, number, numbers
from shardnet.whole import whole

log = logging.getLogger(__name__)
_inherited: list[AsyncExitStack] = []  # from the process that forked this one: see [Note: forked children] in switchboard.py


class Cluster:
    """This process's membership of a cluster; made by `connect`. `backend`, `topology` and everything derived from them belong to
    one epoch, until `reform`."""

    def __init__(self, backend: Backend, topology: Topology) -> None:
        """Wrap a backend that the caller has made, and closes; `connect` uses `_at` to join."""
        self._seat = Seat(backend, topology)
        self._station: Station | None = None
        self._models = WeakSet[AsyncFSDP]()
        self._sharding = asyncio.Lock()
        self._making: set[asyncio.Future[AsyncFSDP]] = set()
        self._recorders: list[PerformanceRecorder] = []
        self._tracker = Tracker(None)

    @classmethod
    async def _at(cls, station: Station, settings: Settings) -> "Cluster":
        seat = await take_seat(station, settings)
        cluster = cls(seat.backend, seat.topology)
        cluster._seat, cluster._station = seat, station
        return cluster

    @property
    def backend(self) -> Backend:
        return self._seat.backend

    @property
    def topology(self) -> Topology:
        return self._seat.topology

    @property
    def elastic(self) -> bool:
        """Whether there may be a next epoch: see `reform`."""
        return self._station is not None and self._station.elastic

    @property
    def joiners(self) -> int:
        """How many workers wait for `reform` to take them in, as far as this rank knows."""
        return self._seat.joiners

    @property
    def spares(self) -> int:
        """How many workers wait for a place, because the job is full, as far as this rank knows."""
        return self._seat.spares

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

    async def shard(self, module: nn.Module, units: UnitChoice = None, *, label: str = "", **options: Unpack[ShardingOptions]) -> AsyncFSDP:
        """Shard a module over the cluster; see `FSDP` for the arguments. All ranks must call it, and several tasks must do so in the same
        order; concurrent calls take turns, in the order in which they were made. Modules of different shapes in different orders raise
        CollectiveMismatch, as do different labels; without labels, ranks could take modules of the same shapes for each other.

        A call that is cancelled while it works goes on to its end, since the other ranks take part in it, or to the end of the cluster. The
        model is closed with the cluster; if you no longer need it before that, call `aclose` or drop it."""

        async def make() -> AsyncFSDP:
            try:
                if label:
                    await self.backend.barrier(label=f"shard {label!r}")
                model = await AsyncFSDP(module, self.backend, units=units, **options)
                self._models.add(model)
                return model
            finally:
                self._sharding.release()

        await self._sharding.acquire()
        making = asyncio.ensure_future(make())
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        making.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled caller does not ask for its error
        return await asyncio.shield(making)

    async def record(self, model: AsyncFSDP | None, optimizer: torch.optim.Optimizer) -> PerformanceRecorder:
        """Measure how fast the network is, then watch a training; `model` is None if it is not sharded. All ranks must
        call it. Closed with the cluster; `shardnet.performance` merges the ranks' figures into the cluster's."""
        link_bytes_per_s = await measure_link(self.backend)
        self.telemetry.link_bytes_per_s = link_bytes_per_s or 0.0
        recorder = PerformanceRecorder(model or self.backend, optimizer, link_bytes_per_s=link_bytes_per_s)
        self._recorders.append(recorder)
        return recorder

    async def mean(self, value: SupportsFloat, *, weight: float = 1.0, label: str = "mean") -> float:
        """The weighted mean of a number over ranks, NaN if all weights are 0; all ranks must call it, and several tasks must do so in the
        same order. If each call has its own `label`, calls in different orders raise CollectiveMismatch. A tensor of one element is
        accepted as a number."""
        weighted = torch.tensor([number(value) * weight, weight], dtype=torch.float64, device="cpu")
        total, weights = (await self.backend.all_reduce(weighted, label=label)).tolist()
        return float(total / weights) if weights else float("nan")

    def report(
        self,
        *,
        step: SupportsIndex,
        total_steps: SupportsIndex = 0,
        loss: SupportsFloat = float("nan"),
        tokens_per_s: SupportsFloat | None = None,
        exposed_share: SupportsFloat | None = None,
        note: str = "",
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Tell the watchers (the launcher's bar, `shardnet status`) how far the training is. Local and cheap.

        With `connect(track=...)`, or after `on_metrics`, rank 0's loss, tokens per second and exposed share are recorded, together with
        `metrics`; those of other ranks are not, nor is what is not given, except that its loss is NaN. A tensor of one element is
        accepted as a number.

        Raises UsageError, on any rank, for a metric that is no number, or whose name the record uses itself, and for a step that is not a
        whole number."""
        reached, wanted = whole(step, "step"), whole(total_steps, "total_steps")
        speeds = {"tokens_per_s": tokens_per_s, "exposed_share": exposed_share}
        known = numbers({"loss": loss} | {name: value for name, value in speeds.items() if value is not None})
        others = numbers(metrics or {})
        if self.rank == 0:
            self._tracker.take(Record(reached, time.time(), self.topology.epoch, self.world_size, known | others))
        self.telemetry.progress = Progress(reached, wanted, note=note, **known)
        self.telemetry.reach(reached)

    def on_metrics(self, function: Callback) -> None:
        """Have `function(step, metrics)` called for each report of rank 0, in order and on a thread of its own: for trackers that shardnet
        does not know. What it raises is logged, and it is not called again."""
        self._tracker.add(function)

    async def reform(self, *, agreed: bool = False, missing: Collection[int] = ()) -> None:
        """Leave this epoch and take a place in the next one, with every other member that does so and with the workers that wait to join.

        For the members of an elastic job (`connect(elastic=True)`): after `PeerLost`, or, with `agreed`, where all ranks call it at the
        same point; then they say goodbye to each other first. Without `agreed`, collectives that the other ranks are in fail with
        PeerLost, and those ranks must reform, too. Rank, world size, backend and topology are new afterwards. Models and recorders that
        this cluster has made are closed, and so are backends and sub-groups: make new ones, and bring the state along with
        `shardnet.elastic`. Waits until all members have come or are gone, and for joiners if fewer are left than the job's minimum; for
        members that are `missing`, as a CollectiveTimeout names them, or that all know to be leaving, at most two seconds longer.

        Raises StateError for a cluster that is not elastic, RendezvousUnavailable, JoinTimeout or JoinRefused if there is no next
        epoch for this worker, and PeerLost if its peers cannot be reached; the cluster is then closed, as after cancelling.
        """
        if self._station is None or not self.elastic:
            raise StateError(
                "this cluster is not elastic, so it cannot reform; start the program with `shardnet run --min-workers` "
                "(or --restarts), or use connect(elastic=True) on all ranks"
            )
        if not agreed:
            self.backend.abort()  # first, so that no compute thread waits for a collective any more
        membership = await self._abandon()
        self._seat = await self._station.join(membership, missing)

    async def withdraw(self) -> None:
        """Leave this epoch and the job, with a goodbye to the peers, while the others form the next epoch: all ranks must be at the same
        point and know that this one leaves. For a worker that is told to leave; in an elastic job, leaving `connect` instead would say
        that the training is over. The cluster is closed afterwards."""
        membership = await self._abandon()
        if membership is not None:
            await end_membership(membership, goodbye=not self.elastic, words=LastWords("it was told to leave") if self.elastic else None)

    async def _leave(self, error: BaseException | None) -> None:
        words = None if error is None else LastWords.of(error)
        try:
            if words is not None:
                self.backend.abort(words.text)  # first, so that no compute thread waits for a collective any more
            await self._close_models()
        finally:
            await self._seat.leave(words)
            if error is None:  # otherwise nobody waits for a call that may be stuck in the program's code
                await self._close_late_models()

    async def _abandon(self) -> Membership | None:
        """End what was made in this epoch, and its backend. Returns the membership, which is left."""
        await self._close_models()
        membership = await self._seat.abandon()
        await self._close_late_models()
        return membership

    async def _close_models(self) -> None:
        while self._recorders:
            self._recorders.pop().close()
        while self._models:
            await self._models.pop().aclose()

    async def _close_late_models(self) -> None:
        """Close models that a cancelled call was still making: without a backend no more are made, but one may have been finished
        already."""
        if self._making:
            await asyncio.wait(self._making)
        await self._close_models()


@asynccontextmanager
async def connect(**settings: Any) -> AsyncIterator[Cluster]:
    """Join the cluster that the environment names (`shardnet run` sets it), or be a world of one if it names none.

    Any field of `Settings` may be given instead: `connect(rendezvous="10.0.0.1:7000", min_world_size=4, …)`.
    Entering waits until the world is complete; raises `UsageError` for a setting that makes no sense, a `RendezvousError` if joining fails
    and `PeerLost` if a peer cannot be reached. Leaving says goodbye to the peers; leaving by an exception does not, so that they fail at
    once, too. A second connect in a process is a separate member, with its own port, and under the same certificate with its own
    `local_rank`. While connected, SIGUSR1 makes the process print what it does, if connect is called in the main thread and nobody else
    handles that signal (docs/diagnosis.md).
    """
    chosen = Settings.from_environment(None, **settings)
    trace, flight = _trace_file(chosen), _flight_folder(chosen)
    process.tune()
    diagnosis = Diagnosis()
    pid = os.getpid()
    async with AsyncExitStack() as stack:
        stack.enter_context(answering(diagnosis.text))
        cluster = await Cluster._at(await stack.enter_async_context(open_station(chosen)), chosen)
        diagnosis.about(cluster.telemetry, lambda: cluster.topology)
        if flight is not None:
            box = BlackBox(flight, chosen.job, cluster.telemetry, lambda: cluster.topology)
            stack.push_async_callback(asyncio.to_thread, box.close)
        cluster._tracker = Tracker(Path(chosen.track) if chosen.track else None)
        stack.push_async_callback(asyncio.to_thread, cluster._tracker.close)
        stack.push_async_exit(lambda kind, error, trace: cluster._leave(error))
        try:
            yield cluster
        finally:
            if os.getpid() != pid:  # in a forked child, which must not close anything; kept, since dropping the stack would close it
                _inherited.append(stack.pop_all())
        if trace is not None and os.getpid() == pid:
            await _write_trace(cluster, trace)


def _trace_file(settings: Settings) -> Path | None:
    """Where the trace goes. Its folder is made now: the end of a long run is too late to learn that this is impossible."""
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


def _flight_folder(settings: Settings) -> Path | None:
    """The folder where the black box writes. It is made now, like the trace's, for the same reason."""
    if not settings.flight:
        return None
    path = Path(settings.flight)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot keep flight records in {path}: {error.strerror}; choose another folder (SHARDNET_FLIGHT)") from error
    return path


async def _write_trace(cluster: Cluster, path: Path) -> None:
    spans = await gather_spans(cluster.backend, cluster.topology.me.address)
    if cluster.rank == 0:
        try:
            write_trace(path, spans)
        except OSError as error:  # the training is done, and its program has more to do
            log.error("the trace cannot be written to %s: %s", path, error.strerror)
            return
        log.info("timeline of %d ranks for https://ui.perfetto.dev: %s", len(spans), path)
