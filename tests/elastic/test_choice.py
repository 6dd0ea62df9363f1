"""Which state the survivors go on with, and that they can: for any layout, any deaths and any moment of a commit."""

from collections import UserDict
from collections.abc import ItemsView, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.elastic.choice import Handover, Offer, choose, handovers, keeper, replicas, sources, structure_of
from shardnet.elastic.generation import Mark
from shardnet.errors import StateLost, UsageError
from shardnet.sharding.split import shard_sizes
from shardnet.state.piece import Span

SIZES = {"a": 10, "b": 3, "c": 1}
STRUCTURE = structure_of(SIZES)


def held(rank: int, world_size: int) -> list[Span]:
    """The non-empty parts that FULL_SHARD gives a rank, one parameter after another."""
    spans = []
    for name, numel in SIZES.items():
        shares = shard_sizes(numel, world_size)
        start = sum(shares[:rank])
        if shares[rank]:
            spans.append(Span(name, start, start + shares[rank]))
    return spans


def nodes_of(sizes: Sequence[int]) -> list[list[int]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def offers_of(ranks: Sequence[int], nodes: Sequence[Sequence[int]], mark: Mark) -> list[Offer]:
    """A complete generation on some ranks of a world: their own parts, and the copies that they keep for others."""
    world_size = sum(len(node) for node in nodes)
    entrusted = {keeper(rank, nodes): rank for rank in range(world_size)}
    return [
        Offer(new, mark, STRUCTURE, tuple({*held(old, world_size), *held(entrusted[old], world_size)})) for new, old in enumerate(ranks)
    ]


worlds = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(nodes_of)


@given(worlds)
def test_each_rank_keeps_one_other_ranks_copy(nodes: list[list[int]]) -> None:
    world_size = sum(len(node) for node in nodes)
    keepers = [keeper(rank, nodes) for rank in range(world_size)]
    assert sorted(keepers) == list(range(world_size))
    assert world_size == 1 or all(keeper != rank for rank, keeper in enumerate(keepers))
    if len(nodes) > 1 and len({len(node) for node in nodes}) == 1:
        node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
        assert all(node_of[rank] != node_of[keeper] for rank, keeper in enumerate(keepers)), "the copy dies with the node"


@given(worlds, st.data())
def test_what_is_left_is_enough_unless_a_rank_died_with_its_keeper(nodes: list[list[int]], data: st.DataObject) -> None:
    world_size = sum(len(node) for node in nodes)
    survivors = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    dead = set(range(world_size)) - set(survivors)
    offers = offers_of(survivors, nodes, Mark(3, 7))
    gone = [span for rank in dead if keeper(rank, nodes) in dead for span in held(rank, world_size)]
    if gone:
        with pytest.raises(StateLost, match=r"the state of step 7 \(epoch 3\) is lost"):
            choose(offers, SIZES)
        return
    choice = choose(offers, SIZES)
    assert choice is not None
    new_world = data.draw(st.integers(1, 5))
    for rank in range(new_world):
        for wanted in held(rank, new_world):
            found = sources(wanted, choice.holders[wanted.name], rank)
            assert [span.start for span, _ in found] + [wanted.stop] == [wanted.start] + [span.stop for span, _ in found], (
                "gaps or overlaps"
            )
            for span, holder in found:
                assert any(each.name == span.name and each.start <= span.start and span.stop <= each.stop for each in offers[holder].spans)


@given(worlds, st.data())
def test_who_leaves_takes_nothing_with_it_nor_does_the_next_that_is_lost(nodes: list[list[int]], data: st.DataObject) -> None:
    world_size = sum(map(len, nodes))
    leaving = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    groups = data.draw(st.lists(st.frozensets(st.integers(0, world_size - 1), min_size=2), unique=True)) if world_size > 1 else []
    staying = set(range(world_size)) - leaving
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    having: dict[int | frozenset[int], set[int]] = {rank: {rank, keeper(rank, nodes)} for rank in range(world_size)}
    having |= {group: set(group) for group in groups}
    before = {of: frozenset(ranks) for of, ranks in having.items()}
    for each in handovers(leaving, nodes, groups):
        assert each.giver in before[each.of], "it gives what it has not"
        assert each.giver in staying or not before[each.of] & staying, "it could be gone"
        assert each.taker in staying - having[each.of]
        having[each.of].add(each.taker)
    for of, ranks in having.items():
        kept = ranks & staying
        assert len(kept) >= min(2, len(staying)), "one loss more would be too much"
        assert len(kept) <= max(2, len(before[of] & staying)), "more copies than are needed"
        if isinstance(of, int) and len({len(node) for node in nodes}) == 1 and len({node_of[rank] for rank in staying}) > 1:
            assert len({node_of[rank] for rank in kept}) > 1, "the loss of a node would be too much"


def test_copies_are_handed_over_to_those_that_have_taken_least() -> None:
    assert handovers([1], nodes_of([4])) == [Handover(giver=0, taker=2, of=0), Handover(giver=2, taker=0, of=1)]
    assert sorted(each.taker for each in handovers([0, 3], nodes_of([6]))) == [1, 2, 4, 5]
    assert handovers([], nodes_of([4])) == handovers([0, 1], nodes_of([2])) == []


def test_what_several_ranks_hold_is_known_by_these_ranks() -> None:
    halves = [{"a": Span("a", 0, 5)}, {"a": Span("a", 5, 10)}]
    alike = replicas([*halves, *halves])
    assert alike == {frozenset({0, 2}): {Span("a", 0, 5)}, frozenset({1, 3}): {Span("a", 5, 10)}}
    assert [each.of for each in handovers([0], nodes_of([4]), alike)] == [0, 3, frozenset({0, 2})]
    assert replicas([{name: Span(name, 0, 1)} for name in SIZES]) == {}, "each has a part of its own"


@given(worlds, st.data())
def test_a_step_is_committed_on_all_or_on_none(nodes: list[list[int]], data: st.DataObject) -> None:
    """At the moment of a death each rank may be anywhere in a commit that the barrier allows: see [Note: all or none]."""
    world_size = sum(len(node) for node in nodes)
    victim = data.draw(st.integers(0, world_size - 1))
    through = data.draw(st.booleans())  # whether the barrier has opened for anybody
    old, new = Mark(2, 5), Mark(2, 6)
    offers: list[Offer] = []
    has_new: set[int] = set()
    for rank in range(world_size):
        stages = ["written", "committed"] if through else ["begun", "written"]
        stage = data.draw(st.sampled_from(stages))
        if rank == victim:
            continue
        number = len({offer.rank for offer in offers})
        before, after = (offers_of([rank], nodes, mark)[0].spans for mark in (old, new))
        if stage != "committed" or data.draw(st.booleans()):  # the old one is there until the next commit begins
            offers.append(Offer(number, old, STRUCTURE, before))
        if stage != "begun":
            offers.append(Offer(number, new, STRUCTURE, after))
            has_new.add(rank)
    if not offers:
        return
    if world_size == 1 or keeper(victim, nodes) == victim:
        return
    choice = choose(offers, SIZES)
    assert choice is not None
    if through:
        assert choice.mark == new, "somebody was told that it is committed"
    else:
        assert choice.mark in (old, new)


def test_what_a_later_epoch_has_decided_counts() -> None:
    """A worker that was away has a higher step, but of an epoch that has ended."""
    nodes = nodes_of([2])
    offers = [
        *offers_of([0, 1], nodes, Mark(4, 10)),
        Offer(2, Mark(3, 11), STRUCTURE, tuple(Span(name, 0, n) for name, n in SIZES.items())),
    ]
    choice = choose(offers, SIZES)
    assert choice is not None
    assert choice.mark == Mark(4, 10)
    assert choice.ranks == (0, 1)


def test_nobody_has_anything_at_first() -> None:
    assert choose([], SIZES) is None


def test_another_models_state_is_refused() -> None:
    offers = offers_of([0], nodes_of([1]), Mark(1, 2))
    with pytest.raises(UsageError, match="the state of step 2 does not fit the parameters"):
        choose(offers, {**SIZES, "d": 4})


def test_the_parameters_are_hashed_once_for_all_ranks() -> None:
    """With 512 ranks and 4000 parameters, hashing them for each offer took a second."""

    class Sizes(UserDict[str, int]):
        listed = 0

        def items(self) -> ItemsView[str, int]:
            self.listed += 1
            return super().items()

    listed = []
    for world_size in (2, 20):
        sizes = Sizes(SIZES)
        assert choose(offers_of(range(world_size), nodes_of([world_size]), Mark(1, 2)), sizes) is not None
        listed.append(sizes.listed)
    assert listed[0] == listed[1]


def test_a_rank_takes_its_own_first_and_replicas_take_turns() -> None:
    whole = Span("a", 0, 10)
    holders = [(whole, 0), (whole, 1), (whole, 2)]
    assert [sources(whole, holders, rank) for rank in (1, 3, 4)] == [[(whole, 1)], [(whole, 0)], [(whole, 1)]]
