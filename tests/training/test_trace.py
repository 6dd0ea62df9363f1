"""Spans of all ranks, gathered and written in the form that trace viewers read."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardnet
from shardnet.backend.gather import gather_json
from shardnet.backend.loopback import LoopbackBackend
from shardnet.errors import PeerLost, ProtocolError
from shardnet.telemetry import Span, Telemetry, Track
from shardnet.training.trace import RankSpans, chrome_trace, gather_spans, lanes, write_trace


def communication(start: int, end: int, name: str = "all_gather") -> Span:
    return Span(name, Track.COMMUNICATION, start, end, step=1, bytes=10)


SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(Track)).map(lambda t: Span("s", t[2], t[0], t[0] + t[1], 0)),
    max_size=30,
)


def assert_nests(events: list[tuple[float, float]]) -> None:
    """Spans (start, end) of one thread lie one after another or one inside the other."""
    enclosing: list[float] = []
    for start, end in sorted(events, key=lambda event: (event[0], -event[1])):
        while enclosing and enclosing[-1] <= start:
            enclosing.pop()
        assert not enclosing or end <= enclosing[-1]
        enclosing.append(end)


@given(SPANS)
def test_lanes_keep_every_span_and_never_overlap(spans: list[Span]) -> None:
    spread = lanes(spans)
    assert sorted((s for lane in spread for s in lane), key=repr) == sorted(spans, key=repr)
    for lane in spread:
        assert_nests([(s.start_ns, s.end_ns) for s in lane])


def test_lanes_are_as_few_as_overlaps_need() -> None:
    assert len(lanes([communication(0, 5), communication(5, 9), communication(9, 12)])) == 1
    assert len(lanes([communication(0, 9), communication(2, 4), communication(4, 9)])) == 1
    assert len(lanes([communication(0, 5), communication(4, 9), communication(8, 12)])) == 2
    assert lanes([]) == []


@given(SPANS, SPANS)
def test_a_trace_is_what_viewers_read(first: list[Span], second: list[Span]) -> None:
    """The rules of the Trace Event Format that viewers rely on."""
    trace = json.loads(json.dumps(chrome_trace([RankSpans(0, "a", tuple(first)), RankSpans(1, "b", tuple(second))])))
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: set[tuple[int, int]] = set()
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys()
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            named.add(thread)
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0 <= event["dur"]
            threads.setdefault(thread, []).append((event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000))
    assert threads.keys() <= named, "a thread without a name"
    assert sum(map(len, threads.values())) == len(first) + len(second)
    for events in threads.values():
        assert_nests([(round(start), round(end)) for start, end in events])


def test_every_rank_is_a_process_and_every_track_a_named_thread(tmp_path: Path) -> None:
    spans = (Span("forward", Track.COMPUTE, 5_000, 9_000, 1), communication(6_000, 8_000), communication(7_000, 12_000, "reduce_scatter"))
    write_trace(tmp_path / "new" / "trace.json", [RankSpans(0, "host:1", spans), RankSpans(1, "host:2", spans[:1])])
    events: list[dict[str, Any]] = json.loads((tmp_path / "new" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0 · host:1", 1: "rank 1 · host:2"}
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0]
    assert threads == ["compute", "communication 1", "communication 2"]
    scatter = next(event for event in events if event["name"] == "reduce_scatter")
    assert (scatter["ts"], scatter["dur"], scatter["args"]) == (2.0, 5.0, {"step": 1, "bytes": 10})


async def gather_all(backends: list[LoopbackBackend]) -> list[list[RankSpans]]:
    return await asyncio.gather(*(gather_spans(backend, f"place {backend.rank}") for backend in backends))


async def test_one_that_cannot_be_written_ends_no_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file that was there stays."""
    path = tmp_path / "folder" / "trace.json"
    async with shardnet.connect(trace=str(path)):
        path.write_text("an older one")
        (path.parent / f".{path.name}.unfinished").mkdir()  # in the way
    assert path.read_text() == "an older one"
    assert f"the trace cannot be written to {path}: Is a directory" in caplog.text


async def test_gathered_spans_are_those_recorded_on_wall_clock_time() -> None:
    """Only rank 0, which writes the file, has them: those of many ranks need gigabytes."""
    backends = LoopbackBackend.create_group(3)
    try:
        for backend in backends:
            backend.telemetry.tracing = True
            backend.telemetry.epoch_offset_ns = 1_700_000_000_000_000_000 + backend.rank
            backend.telemetry.record("forward «ä»", Track.COMPUTE, 100, 200)
        gathered, *others = await gather_all(backends)
        assert others == [[], []]
        assert [(rank.rank, rank.name) for rank in gathered] == [(0, "place 0"), (1, "place 1"), (2, "place 2")]
        for rank in gathered:
            start = 1_700_000_000_000_000_100 + rank.rank
            assert rank.spans[0] == Span("forward «ä»", Track.COMPUTE, start, start + 100, 0)
    finally:
        for backend in backends:
            await backend.aclose()


async def test_spans_that_make_no_sense_are_a_protocol_error_on_all_ranks_naming_the_rank() -> None:
    async def tell_nonsense(backend: LoopbackBackend) -> None:
        assert await gather_json(backend, {"name": "x", "spans": [["f", 99, 0, 1, 0, 0]]}, "spans", to=0) == []
        await gather_json(backend, None, "check of the spans")

    reader, strange, other = backends = LoopbackBackend.create_group(3)
    try:
        results = await asyncio.gather(gather_spans(reader, "y"), gather_spans(other, "z"), tell_nonsense(strange), return_exceptions=True)
        assert results[2] is None
        for error in results[:2]:
            assert isinstance(error, ProtocolError)
            assert "rank 1 sent trace spans that cannot be read" in str(error)
    finally:
        for backend in backends:
            await backend.aclose()


async def test_spans_that_rank_0_has_no_memory_for_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others would wait for an hour for the end of its reading."""

    def decode(value: object, rank: int) -> RankSpans:
        raise MemoryError

    monkeypatch.setattr("shardnet.training.trace._decode", decode)
    backends = LoopbackBackend.create_group(2)
    try:
        for error in await asyncio.gather(*(gather_spans(backend, "x") for backend in backends), return_exceptions=True):
            assert isinstance(error, ProtocolError)
            assert str(error) == "MemoryError()"
    finally:
        for backend in backends:
            await backend.aclose()


async def test_a_rank_that_dies_ends_the_gathering_on_all_ranks() -> None:
    reader, other, dying = backends = LoopbackBackend.create_group(3)
    try:
        gathering = [asyncio.ensure_future(gather_spans(backend, "x")) for backend in (reader, other)]
        assert await gather_json(dying, {"name": "x", "spans": []}, "spans", to=0) == []
        dying.abort("its disk is full")
        for result in await asyncio.gather(*gathering, return_exceptions=True):
            assert isinstance(result, PeerLost)
    finally:
        for backend in backends:
            await backend.aclose()


def test_steps_can_be_picked() -> None:
    telemetry = Telemetry(tracing=True)
    for telemetry.step in range(5):
        telemetry.record("step", Track.COMPUTE, telemetry.step, telemetry.step + 1)
    picked = RankSpans.of(telemetry, 0, "").during([1, 3])
    assert [span.step for span in picked.spans] == [1, 3]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(picked.spans))
