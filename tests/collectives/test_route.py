"""Which way blocks take over nodes: to every node once, through one rank of each, and all ranks agree on it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.collectives.route import Nodes, Route, Routing


@st.composite
def groups(draw: st.DrawFn) -> Nodes:
    """Any distribution of ranks over nodes, ordered as in groups: nodes by their first rank."""
    ranks = list(range(draw(st.integers(1, 12))))
    random.Random(draw(st.integers(0, 1000))).shuffle(ranks)
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    return tuple(sorted(tuple(sorted(ranks[start:end])) for start, end in zip([0, *cuts], [*cuts, len(ranks)], strict=True)))


@given(groups())
def test_a_block_passes_each_node_once_by_one_rank(nodes: Nodes) -> None:
    ranks = sorted(rank for node in nodes for rank in node)
    routes = {rank: Route.of(nodes, rank) for rank in ranks}
    for owner in ranks:
        legs = {rank: route.legs[owner] for rank, route in routes.items()}
        assert legs[owner].carrier == owner
        assert legs[owner].hops == 0
        carrier = owner
        for hops in range(len(nodes)):  # in the order in which blocks are gathered
            node = next(node for node in nodes if carrier in node)
            assert {legs[rank].hops for rank in node} == {hops}
            assert {legs[rank].carrier for rank in node} == {carrier}
            assert legs[legs[carrier].behind].before == carrier
            carrier = legs[carrier].behind
        assert carrier == owner


@given(groups())
def test_who_is_near(nodes: Nodes) -> None:
    for node in nodes:
        for place, rank in enumerate(node):
            route = Route.of(nodes, rank)
            assert route.node == (*node[place + 1 :], *node[: place + 1])
            assert route.neighbours == route.node[:-1]


def test_the_ranks_of_a_node_carry_a_part_each() -> None:
    """Two nodes of three ranks: rank 1 carries on its node the part that rank 4 owns on the other."""
    nodes = ((0, 1, 2), (3, 4, 5))
    assert [leg.carrier for leg in Route.of(nodes, 1).legs] == [0, 1, 2, 0, 1, 2]
    assert [leg.carrier for leg in Route.of(nodes, 3).legs] == [3, 4, 5, 3, 4, 5]
    assert [leg.hops for leg in Route.of(nodes, 3).legs] == [1, 1, 1, 0, 0, 0]


def test_nodes_of_different_sizes() -> None:
    """The two ranks of the small node share what the three of the large one own."""
    assert [leg.carrier for leg in Route.of(((0, 1, 2), (3, 4)), 4).legs] == [3, 4, 3, 3, 4]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (((0,),), "none: there is only one rank"),
        (((0, 1, 2),), "direct between 3 ranks"),
        (((0,), (1,), (2,)), "a ring of 3 ranks"),
        (((0, 1), (2, 3)), "hierarchical: a ring of 2 nodes, direct inside each (2 ranks)"),
        (((0, 1, 2), (3,)), "hierarchical: a ring of 2 nodes, direct inside each (up to 3 ranks)"),
    ],
)
def test_what_it_is_called(nodes: Nodes, text: str) -> None:
    assert str(Route.of(nodes, 0)) == text


def test_a_routing_can_be_forced() -> None:
    nodes = ((0, 2), (1, 3))
    assert Routing.AUTO.cut(nodes) == nodes
    assert Routing.RING.cut(nodes) == ((0,), (1,), (2,), (3,))
    assert Routing.DIRECT.cut(nodes) == ((0, 1, 2, 3),)
