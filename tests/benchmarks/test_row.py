"""What a row says of two timings."""

import pytest

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


def test_json_has_the_agreed_names_and_comes_back() -> None:
    fields = row().to_dict()
    agreed = {"kind", "op", "topology", "transport", "ranks", "bytes", "ours_ms", "peer", "peer_ms", "ratio"}
    assert agreed <= fields.keys()
    assert (fields["topology"], fields["transport"]) == ("one-node", "grpc")
    assert "ours_loss" not in fields  # it says nothing about a collective
    assert Row.from_dict(fields) == row()
