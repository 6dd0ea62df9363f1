"""The truthful figures: what is counted, and the cluster's figure from those of its ranks."""

import json
import math

import pytest

from shardnet.errors import ProtocolError, UsageError
from shardnet.performance import TrainingFigures


def figures(**values: object) -> TrainingFigures:
    """Ten steps of 0.1 s of one rank."""
    usual: dict[str, object] = {"steps": 10, "wall_s": 1.0, "rank_s": 1.0, "step_s": (0.1,) * 10, "samples": 100, "tokens": 1000}
    return TrainingFigures(**(usual | values))  # type: ignore[arg-type]


def test_tokens_are_counted_once_over_wall_time() -> None:
    assert (figures().tokens_per_s, figures().samples_per_s) == (1000, 100)


def test_more_communication_lowers_the_efficiency() -> None:
    seen = [figures(exposed_s=exposed, communicating_s=0.8).efficiency for exposed in (0.0, 0.2, 0.5, 0.8)]
    assert seen == pytest.approx([1.0, 0.8, 0.5, 0.2])


def test_hidden_communication_costs_nothing() -> None:
    hidden = figures(compute_s=0.9, exposed_s=0.0, communicating_s=0.7)
    assert (hidden.efficiency, hidden.hidden_share, hidden.compute_share) == (1.0, 1.0, 0.9)
    assert figures(exposed_s=0.2, communicating_s=0.8).hidden_share == pytest.approx(0.75)


def test_waiting_that_was_not_measured_is_not_none_at_all() -> None:
    unknown = figures(exposed_s=math.nan, communicating_s=0.8)
    cluster = TrainingFigures.merge([figures(communicating_s=0.8), unknown])
    for each in (unknown, cluster, TrainingFigures.from_json(json.loads(json.dumps(unknown.to_json())))):
        assert all(map(math.isnan, (each.exposed_share, each.hidden_share, each.efficiency)))
        assert str(each).endswith("tokens/s; time spent waiting for communication is not measured")


def test_what_goes_over_the_network_is_compared_with_the_link() -> None:
    assert figures(bytes_sent=900, network_bytes=300, capacity_bytes=1000.0).link_share == pytest.approx(0.3)
    assert figures(network_bytes=300).link_share is None


def test_a_node_has_one_link_to_the_next_one_whichever_rank_measures_it() -> None:
    """Two nodes of two ranks: all send over the network, and only the last rank of each node has a next rank on the other node."""
    inner = figures(bytes_sent=5000, network_bytes=200, capacity_bytes=0.0)
    outer = figures(bytes_sent=5000, network_bytes=400, capacity_bytes=1000.0)
    assert TrainingFigures.merge([inner, outer, inner, outer]).link_share == pytest.approx(0.6)
    assert TrainingFigures.merge([inner, inner]).link_share is None, "no link leads to another node"
    assert "links" not in str(inner)


def test_percentiles_are_times_that_occurred() -> None:
    some = figures(step_s=(0.5, 0.1, 0.4, 0.2, 0.3))
    assert [some.step_percentile(percent) for percent in (0, 20, 21, 50, 99, 100)] == [0.1, 0.1, 0.2, 0.3, 0.5, 0.5]
    assert math.isnan(TrainingFigures().step_percentile(50))
    with pytest.raises(UsageError, match="from 0 to 100"):
        some.step_percentile(101)


def test_the_clusters_rate_is_the_sum_over_ranks_and_no_mean() -> None:
    cluster = TrainingFigures.merge([figures(), figures(tokens=3000)])
    assert (cluster.ranks, cluster.steps, cluster.tokens, cluster.samples) == (2, 10, 4000, 200)
    assert cluster.tokens_per_s == 4000  # the mean would be 2000


def test_ranks_step_at_the_pace_of_the_slowest() -> None:
    quick, slow = figures(step_s=(0.1, 0.3)), figures(wall_s=2.0, rank_s=2.0, step_s=(0.2, 0.2))
    cluster = TrainingFigures.merge([quick, slow])
    assert (cluster.wall_s, cluster.rank_s, cluster.step_s) == (2.0, 3.0, (0.2, 0.3))
    assert cluster.tokens_per_s == 1000


def test_shares_of_a_cluster_weigh_ranks_by_their_time() -> None:
    busy = figures(exposed_s=0.6, communicating_s=0.8, network_bytes=700, capacity_bytes=800.0)
    cluster = TrainingFigures.merge([busy, figures(exposed_s=0.2, communicating_s=0.2, network_bytes=50, capacity_bytes=200.0)])
    assert cluster.exposed_share == pytest.approx(0.4)
    assert cluster.hidden_share == pytest.approx(0.2)
    assert cluster.link_share == pytest.approx(0.75)
    assert TrainingFigures.merge([busy, figures()]).link_share is None  # the speed of one rank's link is unknown


def test_merging_in_any_grouping_gives_the_same() -> None:
    one, two, three = (figures(exposed_s=each / 8, step_s=(each / 4,) * 10) for each in (1, 2, 3))
    whole = TrainingFigures.merge([one, two, three])
    assert TrainingFigures.merge([TrainingFigures.merge([one, two]), three]) == whole
    assert TrainingFigures.merge([one]) == one


def test_figures_of_different_steps_are_not_merged() -> None:
    with pytest.raises(UsageError, match="measured 10, 9 steps"):
        TrainingFigures.merge([figures(), figures(steps=9)])
    with pytest.raises(UsageError, match="no figures"):
        TrainingFigures.merge([])


def test_they_travel_as_json() -> None:
    some = figures(exposed_s=0.25, capacity_bytes=2.0)
    assert TrainingFigures.from_json(json.loads(json.dumps(some.to_json()))) == some
    for strange in (None, {}, {"step_s": [], "more": 1}):
        with pytest.raises(ProtocolError, match="not the JSON of TrainingFigures"):
            TrainingFigures.from_json(strange)


def test_they_can_be_read() -> None:
    some = figures(exposed_s=0.05, communicating_s=0.5, network_bytes=30, capacity_bytes=100.0)
    assert str(some) == (
        "10 steps of 1 rank, median 100.0 ms (90 %: 100.0, 99 %: 100.0); 100.0 samples/s; 1,000 tokens/s; "
        "waited for communication 5.0% of the time, 90% of it hidden, at 30% of the links' speed"
    )
    assert str(TrainingFigures()) == "no steps yet"
