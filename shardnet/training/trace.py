"""Timelines of all ranks on one axis, and the Chrome trace format that Perfetto reads.

[Note: lanes] A thread of a Chrome trace may hold spans one after another or one inside the other, but not
overlapping: viewers drop or misdraw those. Collectives of a rank do overlap, so a track becomes as many lanes
(threads of the trace) as it needs.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardnet.backend.base import Backend
from shardnet.backend.gather import gather_json
from shardnet.errors import ProtocolError
from shardnet.telemetry import Span, Telemetry, Track

READING_S = 3600.0  # 10 million spans take rank 0 minutes; a dead rank is noticed in any case
_TRACKS = tuple(Track)
_LANES_PER_TRACK = 1000  # thread numbers reserved for a track; nobody could read more lanes than that


@dataclass(frozen=True, slots=True)
class RankSpans:
    """What one rank did. Times are nanoseconds of the wall clock of its host, not of its own counter."""

    rank: int
    name: str  # for people: where the rank ran
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, telemetry: Telemetry, rank: int, name: str) -> "RankSpans":
        offset = telemetry.epoch_offset_ns
        moved = (Span(s.name, s.track, s.start_ns + offset, s.end_ns + offset, s.step, s.bytes) for s in telemetry.spans())
        return cls(rank, name, tuple(moved))

    def during(self, steps: Iterable[int]) -> "RankSpans":
        """Only the spans of these steps."""
        wanted = frozenset(steps)
        return RankSpans(self.rank, self.name, tuple(span for span in self.spans if span.step in wanted))


async def gather_spans(backend: Backend, name: str) -> list[RankSpans]:
    """The spans of all ranks, on rank 0; an empty list on the others, which need no memory for them. A collective; `name` says where this
    rank runs, for example its address. If rank 0 cannot read them, all ranks raise ProtocolError."""
    mine = RankSpans.of(backend.telemetry, backend.rank, name)
    ranks, problem = list[RankSpans](), None
    try:
        gathered = await gather_json(backend, _encode(mine), "spans", to=0)
        ranks = [_decode(value, rank) for rank, value in enumerate(gathered)]
    except (ProtocolError, MemoryError) as error:
        problem = str(error) or repr(error)
    told = await gather_json(backend, problem, "check of the spans", timeout_s=READING_S)
    if problems := [each for each in told if each is not None]:
        raise ProtocolError(problems[0])
    return ranks


def write_trace(path: Path, ranks: Sequence[RankSpans]) -> None:
    """Write a file for https://ui.perfetto.dev or chrome://tracing: a process for each rank, a thread for each lane. If it raises
    OSError, a file that was there before stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(chrome_trace(ranks), separators=(",", ":")), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def chrome_trace(ranks: Sequence[RankSpans]) -> dict[str, Any]:
    """The trace as a JSON object. Its times are microseconds since the first span of any rank."""
    origin_ns = min((span.start_ns for rank in ranks for span in rank.spans), default=0)
    events = [event for rank in ranks for event in _rank_events(rank, origin_ns)]
    return {"displayTimeUnit": "ms", "otherData": {"wall_clock_of_zero_ns": str(origin_ns)}, "traceEvents": events}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few lanes as a greedy choice finds, see [Note: lanes]. Each lane is in order of start."""
    spread: list[_Lane] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        for lane in spread:
            if lane.takes(span):
                break
        else:
            spread.append(_Lane(span))
    return [lane.spans for lane in spread]


class _Lane:
    """Spans that nest; given in order of start, the longer first."""

    def __init__(self, first: Span) -> None:
        self.spans = [first]
        self._enclosing = [first]  # those that end after the last start, the innermost last

    def takes(self, span: Span) -> bool:
        """Add the span if it nests."""
        while self._enclosing and self._enclosing[-1].end_ns <= span.start_ns:
            self._enclosing.pop()
        if self._enclosing and span.end_ns > self._enclosing[-1].end_ns:
            return False
        self.spans.append(span)
        self._enclosing.append(span)
        return True


def _rank_events(rank: RankSpans, origin_ns: int) -> Iterable[dict[str, Any]]:
    yield _metadata(rank.rank, 0, "process_name", name=f"rank {rank.rank} · {rank.name}")
    yield _metadata(rank.rank, 0, "process_sort_index", sort_index=rank.rank)
    for index, track in enumerate(_TRACKS):
        on_track = lanes(span for span in rank.spans if span.track is track)
        for number, lane in enumerate(on_track):
            thread = index * _LANES_PER_TRACK + number + 1
            yield _metadata(rank.rank, thread, "thread_name", name=f"{track} {number + 1}" if len(on_track) > 1 else str(track))
            yield _metadata(rank.rank, thread, "thread_sort_index", sort_index=thread)
            yield from (_complete(span, rank.rank, thread, origin_ns) for span in lane)


def _metadata(process: int, thread: int, kind: str, **value: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": value}


def _complete(span: Span, process: int, thread: int, origin_ns: int) -> dict[str, Any]:
    """A "complete" event: one span with its duration."""
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": span.name,
        "cat": str(span.track),
        "ts": (span.start_ns - origin_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {"step": span.step, "bytes": span.bytes},
    }


def _encode(rank: RankSpans) -> dict[str, Any]:
    rows = [[s.name, _TRACKS.index(s.track), s.start_ns, s.end_ns, s.step, s.bytes] for s in rank.spans]
    return {"name": rank.name, "spans": rows}


def _decode(value: Any, rank: int) -> RankSpans:
    try:
        spans = tuple(Span(str(name), _TRACKS[track], *map(int, numbers)) for name, track, *numbers in value["spans"])
        return RankSpans(rank, str(value["name"]), spans)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"rank {rank} sent trace spans that cannot be read: {error!r}") from error
