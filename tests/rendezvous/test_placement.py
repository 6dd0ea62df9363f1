"""Ranks: nodes by first arrival, inside a node by hint, then by arrival."""

from shardnet.rendezvous.placement import place
from tests.rendezvous.builders import worker


def test_neighbours_share_a_node_however_they_arrive() -> None:
    nodes = ["b", "a", "b", "c", "a"]
    members = place([worker(i, node=node) for i, node in enumerate(nodes)])
    assert [m.rank for m in members] == [0, 1, 2, 3, 4]
    assert [m.incarnation for m in members] == ["w0", "w2", "w1", "w4", "w3"]
    assert [(m.node, m.node_group, m.local_rank) for m in members] == [("b", 0, 0), ("b", 0, 1), ("a", 1, 0), ("a", 1, 1), ("c", 2, 0)]


def test_launchers_hint_orders_inside_a_node_only() -> None:
    members = place([worker(0, node="a", hint=1), worker(1, node="b", hint=0), worker(2, node="a", hint=0)])
    assert [m.incarnation for m in members] == ["w2", "w0", "w1"]


def test_equal_hints_keep_the_order_of_arrival() -> None:
    assert [m.incarnation for m in place([worker(2), worker(0), worker(1)])] == ["w2", "w0", "w1"]


def test_hints_need_not_be_local_ranks() -> None:
    members = place([worker(0, hint=70), worker(1, hint=7)])
    assert [(m.incarnation, m.local_rank) for m in members] == [("w1", 0), ("w0", 1)]


def test_addresses_are_kept() -> None:
    assert [m.address for m in place([worker(0), worker(1, address="[::1]:9")])] == ["10.0.0.1:7000", "[::1]:9"]
