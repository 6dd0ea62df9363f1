"""Ranks: nodes by first arrival; inside a node by hint, then by arrival. Or by wish, if all workers have one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from shardnet.rendezvous.events import Assigned
from shardnet.rendezvous.job import Job
from shardnet.rendezvous.placement import by_wish, place
from shardnet.rendezvous.request import JoinRequest
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


def wishing(number: int, wish: int | None, *, node: str = "a", hint: int = 0, last_epoch: int = 0) -> JoinRequest:
    return replace(worker(number, most=4, least=1, node=node, hint=hint), wished_rank=wish, last_epoch=last_epoch)


def ranks(requests: Sequence[JoinRequest]) -> list[str]:
    """Who has rank 0, 1, …"""
    return [member.incarnation for member in place(by_wish(requests))]


def test_wishes_are_granted_in_whatever_order_workers_arrive() -> None:
    """torchrun and Slurm number workers like this, node by node."""
    workers = [wishing(i, i, node="ab"[i // 2], hint=i % 2) for i in range(4)]
    assert {tuple(ranks(arrivals)) for arrivals in permutations(workers)} == {("w0", "w1", "w2", "w3")}


def test_ranks_dealt_out_over_the_nodes_in_turn_keep_the_nodes_together() -> None:
    """Slurm deals them out so with --distribution=cyclic. The worker that wishes for rank 0 gets it in any case."""
    workers = [wishing(i, i, node="ab"[i % 2], hint=i // 2) for i in range(4)]
    for arrivals in permutations(workers):
        members = place(by_wish(arrivals))
        assert [m.incarnation for m in members] == ["w0", "w2", "w1", "w3"]
        assert [(m.node, m.node_group, m.local_rank) for m in members] == [("a", 0, 0), ("a", 0, 1), ("b", 1, 0), ("b", 1, 1)]


def test_without_local_ranks_wishes_order_inside_a_node() -> None:
    assert ranks([wishing(0, 2), wishing(1, 0), wishing(2, 1)]) == ["w1", "w2", "w0"]


def test_of_fewer_than_were_numbered_the_order_is_kept() -> None:
    assert ranks([wishing(0, 3, node="b"), wishing(1, 1, node="a")]) == ["w1", "w0"]


@pytest.mark.parametrize("wishes", [(1, None), (1, 1)], ids=["not all wish", "a rank is wished twice"])
def test_wishes_that_do_not_say_who_comes_first_count_for_nothing(wishes: tuple[int, int | None]) -> None:
    assert ranks([wishing(0, wishes[0], node="a"), wishing(1, wishes[1], node="b")]) == ["w0", "w1"]


def test_in_a_later_epoch_the_old_order_counts() -> None:
    assert ranks([wishing(0, 1, node="a", last_epoch=1), wishing(1, 0, node="b")]) == ["w0", "w1"]


def test_a_job_grants_wishes_in_its_first_epoch_and_keeps_them_when_it_reforms() -> None:
    job = Job("job", epoch=0, settle_s=1.0)

    def join(request: JoinRequest) -> dict[str, int]:
        notices = job.join(replace(request, min_world_size=2, max_world_size=2, elastic=True), now=0.0)
        return {each.to: each.event.topology.rank for each in notices if isinstance(each.event, Assigned)}

    first, second = wishing(0, 1, node="a"), wishing(1, 0, node="b")
    assert join(first) == {}
    assert join(second) == {"w0": 1, "w1": 0}
    again = [replace(each, incarnation=f"{each.incarnation}'", previous=each.incarnation, last_epoch=1) for each in (first, second)]
    assert join(again[0]) == {}
    assert join(again[1]) == {"w0'": 1, "w1'": 0}
