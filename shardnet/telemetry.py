"""What one rank did and how long it took: spans for the timeline, counters for the statistics.

All times are `time.perf_counter_ns` of this process; `Telemetry.epoch_offset_ns` turns them into wall-clock time so
that the ranks of one cluster can be drawn on one axis. Safe to use from any thread.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from shardnet.flight import FlightRecorder
from shardnet.histogram import Histogram
from shardnet.pace import Pace
from shardnet.traffic import Traffic
from shardnet.waiting import LATE_NS, Lateness, Stalls, Waiting

MAX_SPANS = 200_000  # per rank, about 40 MB; the oldest go first


class Track(StrEnum):
    """The line of the timeline that a span is drawn on."""

    COMPUTE = "compute"  # forward, backward and optimizer work of the training thread
    COMMUNICATION = "communication"  # a collective, from call to result
    EXPOSED = "exposed"  # the training thread waiting for a collective


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    track: Track
    start_ns: int
    end_ns: int
    step: int
    bytes: int = 0


class TransferDirection(StrEnum):
    """The direction of a copy between a GPU's memory and the CPU's."""

    CPU_TO_GPU = "cpu_to_gpu"
    GPU_TO_CPU = "gpu_to_cpu"


class Pass(StrEnum):
    """A whole forward or backward of a model."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Observer(Protocol):
    """An object that is told what the rank does, as it happens. Its methods are short and raise nothing."""

    def on_step(self, step: int) -> None:
        """The training says, on its own thread, that it has done `step` steps; fewer than before if it goes back."""

    def on_pass(self, kind: Pass, computed_ns: Mapping[str, int]) -> None:
        """A pass has ended, on the thread that trains. `computed_ns` is how long it computed, by span name; waiting is not included."""

    def on_collective(self, op: str, label: str, start_ns: int, end_ns: int, bytes_sent: int) -> None:
        """A collective has succeeded, on the thread that ended it. Ends come in order, unless two threads each end one at the same time."""

    def on_transfer(self, direction: TransferDirection, duration_ns: int, bytes: int) -> None:
        """A copy between a GPU and the CPU has ended, on any thread."""


@dataclass(slots=True)
class OpCounter:
    """Totals of one kind of collective."""

    count: int = 0
    failed: int = 0
    bytes: int = 0  # payload bytes sent by this rank
    seconds: float = 0.0  # from the start of its work to its end
    waited_s: float = 0.0  # the part of these spent waiting for ranks that had not entered it yet
    latency: Histogram = field(default_factory=Histogram)  # of the durations that `seconds` sums up

    def copy(self) -> "OpCounter":
        return OpCounter(self.count, self.failed, self.bytes, self.seconds, self.waited_s, self.latency.copy())


@dataclass(slots=True)
class Progress:
    """The last thing that the training program reported."""

    step: int = 0
    total_steps: int = 0
    loss: float = float("nan")
    tokens_per_s: float = 0.0  # of the whole cluster
    exposed_share: float = 0.0  # part of wall time in which compute waited for communication
    note: str = ""


@dataclass(slots=True)
class Telemetry:
    """One rank's spans and counters; lives as long as the rank's backend."""

    tracing: bool = False  # whether spans are kept: only if somebody will look at them
    step: int = 0
    progress: Progress = field(default_factory=Progress)
    ops: dict[str, OpCounter] = field(default_factory=dict)
    flights: FlightRecorder = field(default_factory=FlightRecorder)
    bytes_sent: int = 0
    bytes_received: int = 0
    stale_chunks: int = 0  # chunks without effect: of another epoch, of a collective that had ended, or a repeated announcement
    exposed_ns: int = 0  # total time the training thread waited for communication
    times_waiting: bool = False  # whether anything counts that time: FSDP and ZeroOptimizer do
    started_ns: int = field(default_factory=time.perf_counter_ns)
    epoch_offset_ns: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    memory_peers: frozenset[int] = frozenset()  # ranks to which data goes through shared memory
    borrowers: frozenset[int] = frozenset()  # those of them that read it directly from this rank's memory
    waiting: tuple[Waiting, ...] = ()  # collectives that have waited for long, one per group; replaced, never changed
    late: dict[int, Lateness] = field(default_factory=dict)  # by rank: how long this one has waited for it, in this epoch
    peers: dict[int, Traffic] = field(default_factory=dict)  # by rank, in this epoch
    stalls: Stalls = field(default_factory=Stalls)
    pace: Pace = field(default_factory=Pace)
    epochs: int = 0  # how many this rank has been a member of
    losses: int = 0  # peers that it has lost, in all epochs
    link_bytes_per_s: float = 0.0  # to the next rank, as measured at a start (performance/link.py); 0: not measured
    routing: str = ""  # the way of large collectives over all ranks, in words
    observers: tuple[Observer, ...] = ()  # replaced, never changed: other threads read it
    _spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def uptime_s(self) -> float:
        return (time.perf_counter_ns() - self.started_ns) / 1e9

    @property
    def network_bytes_sent(self) -> int:
        """Payload bytes that have gone over the network in this epoch, but for little chunks to ranks with which memory is shared."""
        with self._lock:
            return sum(traffic.sent_network for rank, traffic in self.peers.items() if rank not in self.memory_peers)

    def record(self, name: str, track: Track, start_ns: int, end_ns: int, bytes: int = 0) -> None:
        """Keep a span that has ended. Exposed time is counted whether or not tracing is on."""
        if track is Track.EXPOSED:
            with self._lock:
                self.exposed_ns += end_ns - start_ns
        if self.tracing:
            self._spans.append(Span(name, track, start_ns, end_ns, self.step, bytes))

    @contextmanager
    def span(self, name: str, track: Track = Track.COMPUTE) -> Iterator[None]:
        """Record the time that the `with` block takes."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(name, track, start, time.perf_counter_ns())

    def count_op(self, op: str, label: str, start_ns: int, end_ns: int, bytes_sent: int, *, waited_ns: int, failed: bool) -> None:
        """Count a collective that has ended; observers hear of those that succeeded."""
        with self._lock:
            counter = self.ops.setdefault(op, OpCounter())
            counter.count += 1
            counter.failed += failed
            counter.bytes += bytes_sent
            counter.seconds += (end_ns - start_ns) / 1e9
            counter.waited_s += waited_ns / 1e9
            counter.latency.add(end_ns - start_ns)
        if not failed:
            for observer in self.observers:
                observer.on_collective(op, label, start_ns, end_ns, bytes_sent)

    def count_transfer(self, direction: TransferDirection, duration_ns: int, bytes: int) -> None:
        """Tell the observers that a copy of a collective has ended."""
        for observer in self.observers:
            observer.on_transfer(direction, duration_ns, bytes)

    def reach(self, step: int) -> None:
        """Note that the training has done `step` steps."""
        self.step = step
        with self._lock:
            self.pace.reach(step, time.perf_counter_ns(), self.exposed_ns)
        for observer in self.observers:
            observer.on_step(step)

    def begin_epoch(self) -> None:
        """Begin a new epoch: ranks now mean other workers."""
        with self._lock:
            self.epochs += 1
            self.late, self.peers = {}, {}
            self.pace.pause()

    def count_wait(self, rank: int, start_ns: int, end_ns: int) -> None:
        """Count that this rank has waited for another one to enter a collective, if the wait was long."""
        if end_ns - start_ns > LATE_NS:
            with self._lock:
                self.late.setdefault(rank, Lateness()).add(start_ns, end_ns)

    def end_pass(self, kind: Pass, computed_ns: Mapping[str, int]) -> None:
        """Tell the observers that a forward or backward has ended."""
        for observer in self.observers:
            observer.on_pass(kind, computed_ns)

    def observe(self, observer: Observer) -> None:
        with self._lock:
            self.observers = (*self.observers, observer)

    def forget(self, observer: Observer) -> None:
        with self._lock:
            self.observers = tuple(other for other in self.observers if other is not observer)

    def count_sent(self, bytes: int, *, near: Collection[int] = (), far: Collection[int] = ()) -> None:
        """Count payload that went to each of these ranks: to the near ones through memory, to the far ones over the network."""
        with self._lock:
            self.bytes_sent += bytes * (len(near) + len(far))
            for rank in near:
                self._traffic(rank).sent_memory += bytes
            for rank in far:
                self._traffic(rank).sent_network += bytes

    def count_near(self, sent: Mapping[int, int], received: Mapping[int, int]) -> None:
        """Count payload bytes that went to these ranks, and came from those, through memory."""
        with self._lock:
            self.bytes_sent += sum(sent.values())
            self.bytes_received += sum(received.values())
            for rank, size in sent.items():
                self._traffic(rank).sent_memory += size
            for rank, size in received.items():
                self._traffic(rank).received_memory += size

    def count_received(self, rank: int, bytes: int, *, near: bool) -> None:
        """Count payload that came from a rank, through memory if it is `near`."""
        with self._lock:
            self.bytes_received += bytes
            if near:
                self._traffic(rank).received_memory += bytes
            else:
                self._traffic(rank).received_network += bytes

    def _traffic(self, rank: int) -> Traffic:
        return self.peers.setdefault(rank, Traffic())

    def count_stale(self, chunks: int = 1) -> None:
        with self._lock:
            self.stale_chunks += chunks

    def totals(self) -> tuple[dict[str, OpCounter], Pace]:
        """Copies of the counters by kind of collective, and of the pace, all taken at the same moment."""
        with self._lock:
            return {op: counter.copy() for op, counter in self.ops.items()}, self.pace.copy()

    def spans(self) -> list[Span]:
        """A copy of the spans kept so far, in order of their end."""
        return list(self._spans)
