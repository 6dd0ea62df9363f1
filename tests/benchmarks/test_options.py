"""From the command line to what is measured."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.options import LATEST, parse_options
from benchmarks.plan import (
    COLLECTIVES,
    Case,
    Collectives,
    Memory,
    Op,
    Topology,
    Training,
    Transport,
    default_repeats,
    default_steps,
    from_json,
    to_json,
)
from shardnet.config import KIB, MIB


def test_by_default_everything_is_measured() -> None:
    options = parse_options([])
    *asked, growths = (list(group) for _, group in groupby(options.sessions, lambda session: session.kind == growth.KIND))
    assert growths == list(growth.sessions(options.chunk))
    options.sessions = asked[0]
    collectives = [session for session in options.sessions if isinstance(session, Collectives)]
    trainings = [session for session in options.sessions if type(session) is Training]
    memories = [session for session in options.sessions if isinstance(session, Memory)]
    assert [(session.topology, session.ranks, session.transport) for session in collectives] == [
        *((Topology.ONE_NODE, ranks, transport) for ranks in (2, 4) for transport in (Transport.GRPC, Transport.MTLS, Transport.SHM)),
        *((Topology.NETNS, ranks, transport) for ranks in (2, 4) for transport in (Transport.GRPC, Transport.MTLS)),
        (Topology.NETNS_1GBIT, 4, Transport.HIER),
    ]
    assert [(session.topology, session.ranks, session.transport) for session in trainings] == [
        *((Topology.ONE_NODE, ranks, transport) for ranks in (2, 4) for transport in (Transport.GRPC, Transport.SHM)),
        *((Topology.NETNS, ranks, Transport.GRPC) for ranks in (2, 4)),
        (Topology.NETNS_1GBIT, 4, Transport.HIER),
    ]
    assert [(session.topology, session.ranks, session.transport) for session in memories] == [
        (Topology.ONE_NODE, ranks, Transport.SHM) for ranks in (2, 4)
    ]
    assert [session.compressions for session in trainings] == [*[()] * 6, ("int8", "bfloat16")]
    assert all(session.explain for session in collectives)
    assert not any(session.explain for session in parse_options(["--no-explain"]).sessions if isinstance(session, Collectives))
    for session in collectives:
        ops = tuple(Op) if session.transport is Transport.SHM else COLLECTIVES
        expected = [(op, size) for op in ops for size in (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)]
        assert session.cases == tuple(Case(op, size, default_repeats(size, session.topology)) for op, size in expected)
    assert [session.steps for session in trainings] == [default_steps(session.topology) for session in trainings]
    assert options.json == LATEST


def test_each_half_alone() -> None:
    (collectives,) = parse_options(
        [
            "--no-explain",
            "--only",
            "collectives",
            "--transports",
            "shm",
            "--ranks",
            "3",
            "--sizes",
            "12KiB",
            "--ops",
            "all_reduce",
            "--repeats",
            "7",
        ]
    ).sessions
    assert collectives == Collectives(3, Topology.ONE_NODE, Transport.SHM, 2 * MIB, (Case(Op.ALL_REDUCE, 12 * KIB, 7),))
    four, two = parse_options(
        [
            "--only",
            "step",
            "--topologies",
            "one-node",
            "--transports",
            "grpc",
            "--step-ranks",
            "4,2",
            "--steps",
            "9",
            "--dim",
            "16",
            "--chunk",
            "64K",
        ]
    ).sessions
    assert (four.ranks, two.ranks, two.steps, two.dim, two.chunk_bytes) == (4, 2, 9, 16, 64 * KIB)


def test_what_is_given_goes_before_quick() -> None:
    session, training, memory, interop = parse_options(["--quick", "--transports", "shm", "--ranks", "4"]).sessions
    assert session.ranks == 4
    assert max(case.bytes for case in session.cases) == MIB
    assert (training.layers, memory.layers, interop.layers) == (2, 2, 2)
    assert training.steps < parse_options(["--only", "step"]).sessions[-1].steps
    assert [each.steps for each in parse_options(["--quick", "--steps", "50", "--transports", "shm"]).sessions[1:]] == [50, 50, 50]


def test_growth_is_another_question_that_varies_one_thing_at_a_time() -> None:
    assert parse_options(["--only", "growth", "--topologies", "netns"]).sessions == []
    assert parse_options(["--only", "growth", "--transports", "grpc"]).sessions == []
    assert all(session.kind != growth.KIND for session in parse_options(["--quick"]).sessions)
    sessions = parse_options(["--only", "growth", "--chunk", "64K"]).sessions
    assert {session.kind for session in sessions} == {growth.KIND}
    collectives = [session for session in sessions if isinstance(session, Collectives)]
    cases = [(session.ranks, case) for session in collectives for case in session.cases]
    assert {ranks for ranks, _ in cases} == {2, 4, 8, 16}
    assert len({(ranks, case.op, case.bytes, case.outstanding) for ranks, case in cases}) == len(cases)
    assert {case.outstanding for _, case in cases} == {1, 2, 4, 8, 16, 32}
    assert all(case.outstanding == 1 or (ranks, case.op) == (2, Op.ALL_REDUCE) for ranks, case in cases)
    trainings = [session for session in sessions if isinstance(session, Training)]
    assert [session.layers for session in trainings] == [2, 4, 8, 16]
    assert len({replace(session, layers=0) for session in trainings}) == 1
    assert all(session.chunk_bytes == 64 * KIB for session in sessions)
    for session in sessions:
        assert from_json(to_json(session)) == session


def test_each_topology_alone() -> None:
    arguments = ["--only", "collectives", "--ranks", "2,3", "--sizes", "12KiB"]
    places = {
        "one-node": [(ranks, transport, 1) for ranks in (2, 3) for transport in ("grpc", "grpc-mtls", "shm")],
        "netns": [(ranks, transport, ranks) for ranks in (2, 3) for transport in ("grpc", "grpc-mtls")],
        "netns-1gbit": [(4, "hier", 2)],
    }
    for name, expected in places.items():
        sessions = parse_options([*arguments, "--topologies", name]).sessions
        assert [(session.ranks, session.transport, session.topology.nodes(session.ranks)) for session in sessions] == expected
    assert len(parse_options([*arguments, "--topologies", "netns,one-node"]).sessions) == 10


def test_memory_does_not_reach_another_node() -> None:
    assert parse_options(["--topologies", "netns", "--transports", "shm"]).sessions == []


def test_a_slow_link_is_tried_less_often() -> None:
    assert default_repeats(64 * MIB, Topology.NETNS_1GBIT) < default_repeats(64 * MIB, Topology.NETNS)
    assert default_repeats(KIB, Topology.NETNS_1GBIT) == default_repeats(KIB, Topology.ONE_NODE)
    assert default_steps(Topology.NETNS_1GBIT) < default_steps(Topology.NETNS)
    given = parse_options(["--topologies", "netns-1gbit", "--repeats", "7", "--steps", "9"]).sessions
    assert [case.repeats for case in given[0].cases] == [7] * len(given[0].cases)
    assert given[1].steps == 9


def test_what_is_compressed_and_whether_time_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    session, training = parse_options(["--quick", "--explain", "--compress", "bfloat16", "--topologies", "netns-1gbit"]).sessions
    assert session.explain
    assert training.compressions == ("bfloat16",)
    assert parse_options(["--compress", "none", "--topologies", "netns-1gbit"]).sessions[1].compressions == ()
    with pytest.raises(SystemExit):
        parse_options(["--compress", "int8,int4"])
    assert "must be a list of int8, bfloat16, or none, got 'int4'" in capsys.readouterr().err


def test_markdown_of_the_latest_run_or_of_a_file() -> None:
    assert parse_options([]).markdown is None
    assert parse_options(["--markdown"]).markdown == LATEST
    assert parse_options(["--markdown", "old.json"]).markdown == Path("old.json")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "speed"], "speed"),
        (["--sizes", "1001"], "multiples of 4 bytes x ranks"),
        (["--sizes", "12KiB", "--ranks", "2,5"], "12288 for 5 ranks"),
        (["--sizes", "12", "--ranks", "3", "--topologies", "netns-1gbit"], "12 for 4 ranks"),
        (["--topologies", "moon"], "moon"),
        (["--sizes", "1 mile"], "KiB or MiB"),
        (["--sizes", "0"], "KiB or MiB"),
        (["--ranks", "1"], "at least 2 ranks"),
        (["--ops", "broadcast"], "broadcast"),
        (["--transports", "rdma"], "rdma"),
        (["--repeats", "0"], "must be a whole number from 1 on"),
        (["--dim", "30"], "twice --heads"),
        (["--chunk", "1G"], "--chunk"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)
    assert complaint in capsys.readouterr().err


def test_results_need_matplotlib_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.options.find_spec", lambda _: None)
    assert parse_options(["--quick"]).results is None
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--quick", "--results", "somewhere"])
    assert "needs matplotlib, which is missing" in capsys.readouterr().err


def test_sessions_reach_the_workers_unchanged() -> None:
    for session in parse_options([]).sessions:
        assert from_json(to_json(session)) == session


def test_moved_bytes_are_those_of_a_ring() -> None:
    assert Op.ALL_GATHER.moved_bytes(400, ranks=4) == 1200  # each of 4 shards of 100 bytes is sent 3 times
    assert Op.REDUCE_SCATTER.moved_bytes(400, ranks=4) == 1200
    assert Op.ALL_REDUCE.moved_bytes(400, ranks=4) == 2400
