"""Whether a run reached what shardnet wants to reach."""

from dataclasses import replace

import pytest

from benchmarks.plan import COLLECTIVES, Op
from benchmarks.row import Row
from benchmarks.targets import (
    ALONE,
    COMPRESSED,
    FSDP2,
    FULL_LINK,
    NO_COMMUNICATION,
    NO_WAITING,
    STEP_BYTES,
    UNITS,
    Limit,
    geometric_mean,
    judge,
    judge_steps,
)
from shardnet.config import KIB, MIB
from tests.benchmarks.rows import complete, row


def told(limit: Limit | None) -> tuple[object, str]:
    assert limit is not None
    return limit.ratio, limit.if_


def test_gathering_and_scattering_are_judged_together() -> None:
    gathers, reduces = judge(complete({Op.ALL_GATHER: 2.0, Op.REDUCE_SCATTER: 0.5, Op.ALL_REDUCE: 0.59}))
    assert gathers.mean == pytest.approx(1.0)
    assert gathers.met
    assert reduces.mean == pytest.approx(0.59)
    assert reduces.met is False


def test_what_goes_through_memory_has_a_target_of_its_own() -> None:
    rows = complete({Op.ALL_GATHER: 8.0, Op.REDUCE_SCATTER: 4.0, Op.ALL_REDUCE: 3.9}, transport="shm")
    (outcome,) = judge(rows)
    assert outcome.mean == pytest.approx((8 * 4 * 3.9) ** (1 / 3))
    assert outcome.met is False
    assert len(judge(rows + complete({Op.ALL_REDUCE: 0.7}))) == 2


@pytest.mark.parametrize(
    ("topology", "transport", "ratios", "met"),
    [
        ("netns", "grpc", {Op.ALL_GATHER: 1.3, Op.REDUCE_SCATTER: 1.31, Op.ALL_REDUCE: 0.99}, [True, False]),
        ("netns-1gbit", "hier", {Op.ALL_GATHER: 1.8, Op.REDUCE_SCATTER: 1.7, Op.ALL_REDUCE: 1.9}, [False, False]),
    ],
)
def test_nodes_have_targets_of_their_own(topology: str, transport: str, ratios: dict[Op, float], met: list[bool]) -> None:
    outcomes = judge(complete(ratios, ranks=4, topology=topology, transport=transport, nodes=2) + complete({Op.ALL_REDUCE: 0.7}, ranks=4))
    assert [outcome.met for outcome in outcomes if outcome.target.topology == topology] == met
    assert [outcome.mean for outcome in outcomes if outcome.target.topology == "one-node"] == [pytest.approx(0.7)]


@pytest.mark.parametrize(("reached", "met"), [(0.96, True), (0.94, False)])
def test_a_link_is_to_be_used_well(reached: float, met: bool) -> None:
    link = 1e9 / 8 * 1448 / 1514  # payload bytes a second
    moved = int(0.01 * reached * link * 2) * 3  # in a ring of 4; half of a third of these bytes cross the link, in shardnet's 10 ms
    rows = complete(dict.fromkeys(COLLECTIVES, 9.0), ranks=4, topology="netns-1gbit", transport="hier", nodes=2, moved_bytes=moved)
    gloo, bound = judge(rows)
    assert gloo.met
    assert told(gloo.limit) == (pytest.approx(9.0 / reached, rel=1e-6), FULL_LINK)
    assert bound.limit is None
    assert bound.target.name.endswith("(link's bound / shardnet)")
    assert bound.mean == pytest.approx(reached, rel=1e-6)
    assert bound.met is met


@pytest.mark.parametrize(("reached", "met"), [(0.81, True), (0.79, False)])
def test_memory_is_to_be_used_well(reached: float, met: bool) -> None:
    rows = complete(dict.fromkeys(COLLECTIVES, 9.0), transport="shm", memcpy_ms=10.0 * reached)
    gloo, bound = judge(rows)
    assert gloo.met
    assert bound.mean == pytest.approx(reached)
    assert bound.met is met


def test_what_is_missed_through_memory_says_what_there_would_be_without_waiting() -> None:
    rows = complete(dict.fromkeys(COLLECTIVES, 4.0), transport="shm", memcpy_ms=5.0, copies_ms=8.0)
    gloo, memcpy = judge(rows)
    assert told(gloo.limit) == (pytest.approx(5.0), NO_WAITING)
    assert told(memcpy.limit) == (pytest.approx(5.0 / 8.0), NO_WAITING)
    unknown, _ = judge([*rows[1:], replace(rows[0], copies_ms=None)])
    assert unknown.limit is None


def test_each_number_of_ranks_has_a_verdict_of_its_own() -> None:
    fast, slow = {Op.ALL_REDUCE: 0.7}, {Op.ALL_REDUCE: 0.5}
    assert [(outcome.ranks, outcome.met) for outcome in judge(complete(slow, ranks=4) + complete(fast, ranks=2))] == [(2, True), (4, False)]


def test_small_messages_do_not_count() -> None:
    slow = [row(0.01, op=Op.ALL_REDUCE, bytes=KIB)]
    (outcome,) = judge(complete({Op.ALL_REDUCE: 0.7}) + slow)
    assert outcome.mean == pytest.approx(0.7)
    assert judge(slow) == []


@pytest.mark.parametrize(("ratio", "met"), [(3.0, True), (2.9, False)])
def test_through_memory_they_have_a_target_of_their_own(ratio: float, met: bool) -> None:
    small = [
        row(ratio, op=op, bytes=size * KIB, transport="shm") for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE) for size in (1, 64)
    ]
    (outcome,) = judge(small)
    assert outcome.target.name == "all_gather + reduce_scatter + all_reduce, small"
    assert outcome.met is met
    assert judge([*small[1:], row(9.0, op=Op.ALL_GATHER, bytes=16 * KIB, transport="shm")])[0].met is None
    assert judge([row(1.0, op=Op.ALL_GATHER, bytes=KIB, transport="shm", outstanding=2)]) == []


def test_a_part_of_the_cases_is_no_verdict() -> None:
    (outcome,) = judge([row(5.0, op=Op.ALL_REDUCE, bytes=MIB)])
    assert outcome.met is None
    assert outcome.cases == 1


def test_geometric_mean() -> None:
    assert geometric_mean([0.25, 4.0]) == pytest.approx(1.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)


def steps(topology: str, transport: str, size: int = STEP_BYTES, **ratios: float) -> list[Row]:
    """Shardnet's training and its peers, each taking `ratio` times as long."""
    names = {"fsdp2": FSDP2, "alone": ALONE, "int8": COMPRESSED["int8"], "bfloat16": COMPRESSED["bfloat16"]}
    facts = {"kind": "step", "op": "train_step", "topology": topology, "transport": transport, "ranks": 4, "bytes": size}
    return [row(ratio, peer=names[name], **facts) for name, ratio in ratios.items()]


def test_steps_are_judged_against_each_peer() -> None:
    fsdp2, alone = judge_steps(steps("one-node", "shm", fsdp2=1.4, alone=0.88))
    assert fsdp2.ratio == pytest.approx(1.4)
    assert fsdp2.met is False
    assert told(fsdp2.limit) == (pytest.approx(1.4 / 0.88), NO_COMMUNICATION)
    assert alone.ratio == pytest.approx(0.88)
    assert alone.met


def test_compression_is_judged_by_what_fsdp2_takes() -> None:
    """FSDP2 takes 3 times shardnet's time, and the compressed training 0.9 times: a ratio of 3.33."""
    plain, compressed, half = judge_steps(steps("netns-1gbit", "hier", fsdp2=3.0, alone=0.5, int8=0.9, bfloat16=1.1))
    assert plain.met
    assert compressed.ratio == pytest.approx(3.0 / 0.9)
    assert compressed.met
    assert half.met is False


def test_a_small_model_is_no_verdict() -> None:
    assert [outcome.met for outcome in judge_steps(steps("one-node", "shm", 4_000_000, fsdp2=9.0))] == [None]


def test_places_without_a_target_are_not_judged() -> None:
    assert judge_steps(steps("netns", "grpc", fsdp2=9.0) + complete({Op.ALL_REDUCE: 2.0})) == []


@pytest.mark.parametrize(("memcpy_ms", "met"), [(11.0, True), (9.0, False)])
def test_a_gather_for_a_node_is_compared_with_memcpy(memcpy_ms: float, met: bool) -> None:
    """This holds whatever gloo takes, and sizes below a unit do not count."""
    rows = [row(0.5, op=Op.GATHER_ON_NODE, bytes=size, transport="shm", memcpy_ms=memcpy_ms) for size in UNITS]
    rows.append(row(0.5, op=Op.GATHER_ON_NODE, bytes=MIB, transport="shm", memcpy_ms=0.01))
    (outcome,) = judge(rows)
    assert (outcome.met, outcome.target.peer) == (met, "memcpy")
    assert outcome.mean == pytest.approx(memcpy_ms / 10.0)
    assert outcome.target.name == "gather_on_node (memcpy / shardnet), of a unit"
    assert judge([row(0.5, op=Op.GATHER_ON_NODE, bytes=UNITS[0], transport="shm")]) == []
