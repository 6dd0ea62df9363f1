"""What a row says of two timings."""

from typing import Any

import pytest

from benchmarks.plan import Op
from benchmarks.row import Row, Timing
from tests.benchmarks.rows import row


def test_ratio_is_above_one_where_shardnet_is_ahead() -> None:
    assert row(ratio=2.0).ratio == pytest.approx(2.0)
    assert row(ratio=0.5).peer_ms == pytest.approx(5.0)


def test_median_and_quartiles_in_milliseconds() -> None:
    assert Timing((0.005, 0.001, 0.002, 0.004, 0.003), cpu_s=0).quartiles_ms() == pytest.approx((2, 3, 4))


def test_one_run_has_no_spread() -> None:
    assert Timing((0.002,), cpu_s=0).quartiles_ms() == (2, 2, 2)


def test_an_outlier_moves_neither_median_nor_ratio() -> None:
    calm = Timing((0.01,) * 9, cpu_s=0)
    disturbed = Timing((*[0.02] * 8, 5.0), cpu_s=0)
    facts = {
        "topology": "one-node",
        "kind": "collective",
        "op": "all_gather",
        "transport": "shm",
        "ranks": 2,
        "bytes": 8,
        "peer": "gloo",
        "moved_bytes": 8,
        "chunk_bytes": 8,
    }
    assert Row.compare(calm, disturbed, **facts).ratio == pytest.approx(2.0)


def test_the_links_bound_is_what_a_node_has_to_receive_once() -> None:
    """At 1 Gbit/s, of which 1448 bytes in 1514 are payload; 4 ranks on 2 nodes, so half of the tensor comes from the other one."""
    size, bytes_per_ms = 64 << 20, 125_000 * 1448 / 1514
    facts: dict[str, Any] = {"topology": "netns-1gbit", "nodes": 2, "ranks": 4, "bytes": size}
    for op, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        bound_ms = row(op=op, moved_bytes=Op(op).moved_bytes(size, ranks=4), **facts).link_bound_ms
        assert bound_ms == pytest.approx(times * size / 2 / bytes_per_ms)
    assert row(topology="netns", nodes=2).link_bound_ms is None
    assert row().link_bound_ms is None


def test_json_has_the_agreed_names_and_comes_back() -> None:
    fields = row().to_dict()
    agreed = {"kind", "op", "topology", "transport", "ranks", "bytes", "ours_ms", "peer", "peer_ms", "ratio"}
    assert agreed <= fields.keys()
    assert (fields["topology"], fields["transport"]) == ("one-node", "grpc")
    assert "ours_loss" not in fields  # it says nothing about a collective
    assert Row.from_dict(fields) == row()
