"""Members that others name when they join again: [Note: the stuck] in job.py."""

from dataclasses import replace

import pytest

from shardnet.rendezvous.job import MISSED_S
from shardnet.rendezvous.membership import Registry
from tests.rendezvous.builders import SETTLE, again, assigned, elastic, formed, joiners


@pytest.fixture
def registry() -> Registry:
    return Registry(settle_s=SETTLE)


def test_a_stuck_member_that_others_miss_is_given_up_when_nobody_else_is_waited_for(registry: Registry) -> None:
    workers = formed(registry, 4)
    registry.join(replace(again(workers[0]), missing=(2,)), 10.0)
    assert registry.deadline() is None, "others are waited for"
    registry.join(again(workers[1]), 11.0)  # it has heard of the loss in another way
    assert not assigned(registry.join(replace(again(workers[3]), missing=(2,)), 12.0))
    assert registry.deadline() == 12.0 + MISSED_S
    assert registry.tick(12.0 + MISSED_S - 0.1) == []
    worlds = assigned(registry.tick(12.0 + MISSED_S))
    assert {name: (world.epoch, world.rank) for name, world in worlds.items()} == {"w0+": (2, 0), "w1+": (2, 1), "w3+": (2, 2)}
    assert registry.deadline() is None
    assert not registry.is_member("w2")
    assert registry.vanish("w2") == [], "its connection says nothing any more"
    back = registry.join(again(workers[2]), 20.0)  # as a new worker
    assert joiners(back) == {"w0+": 1, "w1+": 1, "w3+": 1}


def test_newcomers_do_not_lengthen_the_time_that_a_stuck_member_has(registry: Registry) -> None:
    workers = formed(registry, 3)
    for number in (0, 1):
        registry.join(replace(again(workers[number]), missing=(2,)), 10.0)
    registry.join(elastic(7), 10.0 + MISSED_S - 0.1)
    assert registry.deadline() == 10.0 + MISSED_S
    assert assigned(registry.tick(10.0 + MISSED_S)).keys() == {"w0+", "w1+", "w7"}


def test_a_member_that_is_missed_in_a_later_epoch_has_its_time_too(registry: Registry) -> None:
    """Whether those of the epoch before waited for one."""
    workers = formed(registry, 3)
    for number in (0, 1):
        registry.join(replace(again(workers[number]), missing=(2,)), 10.0)
    registry.fail("job", "w2", "it was told to leave")
    later = replace(again(again(workers[0]), epoch=2), missing=(1,))
    assert not assigned(registry.join(later, 500.0))
    assert registry.deadline() == 500.0 + MISSED_S
    assert not assigned(registry.tick(500.0))
    assert registry.is_member("w1+")


def test_a_member_that_is_missed_has_its_time_also_when_the_last_of_the_others_dies(registry: Registry) -> None:
    """It may be as slow as that one was."""
    workers = formed(registry, 3)
    registry.join(replace(again(workers[0]), missing=(2,)), 10.0)
    registry.vanish("w1")
    deadline = registry.deadline()
    assert deadline is not None
    assert deadline <= 30.0, "somebody must look when it was"
    assert registry.tick(30.0) == []
    assert registry.deadline() == 30.0 + MISSED_S
    assert not assigned(registry.tick(30.0 + MISSED_S - 0.1))
    assert registry.is_member("w2")
    assert assigned(registry.join(again(workers[2]), 30.0 + MISSED_S - 0.1)).keys() == {"w0+", "w2+"}


def test_a_missed_member_that_comes_in_time_stays(registry: Registry) -> None:
    workers = formed(registry, 3, most=3)
    registry.join(replace(again(workers[0]), missing=(2,)), 10.0)
    registry.join(replace(again(workers[1]), missing=(2,)), 10.0)
    assert len(assigned(registry.join(replace(again(workers[2]), missing=(0, 1)), 10.0 + MISSED_S - 0.1))) == 3
    assert registry.deadline() is None


def test_who_comes_back_from_a_broken_connection_keeps_its_rank_and_may_name_the_stuck(registry: Registry) -> None:
    workers = formed(registry, 3)
    registry.vanish("w0")
    registry.join(again(workers[1]), 10.0)
    registry.join(replace(again(workers[0]), missing=(2,)), 11.0)
    worlds = assigned(registry.tick(11.0 + MISSED_S))
    assert {name: world.rank for name, world in worlds.items()} == {"w0+": 0, "w1+": 1}


def test_so_does_who_loses_its_connection_while_it_waits_for_the_others(registry: Registry) -> None:
    workers = formed(registry, 3)
    registry.join(again(workers[0]), 10.0)
    registry.vanish("w0+")
    registry.join(again(workers[1]), 11.0)
    registry.join(again(workers[0]), 12.0)
    worlds = assigned(registry.join(again(workers[2]), 13.0))
    assert {name: world.rank for name, world in worlds.items()} == {"w0+": 0, "w1+": 1, "w2+": 2}


def test_a_stuck_member_whose_connection_breaks_and_comes_back_is_still_stuck(registry: Registry) -> None:
    workers = formed(registry, 3)
    registry.vanish("w2")
    registry.join(replace(again(workers[0]), missing=(2,)), 10.0)
    registry.resume(workers[2])
    registry.join(again(workers[1]), 11.0)
    assert assigned(registry.tick(11.0 + MISSED_S)).keys() == {"w0+", "w1+"}


def test_nobody_is_given_up_for_what_was_missed_in_another_epoch(registry: Registry) -> None:
    workers = formed(registry, 2, most=2)
    registry.join(replace(again(workers[0], epoch=7), missing=(1,)), 10.0)
    assert registry.deadline() is None


def test_a_stranger_can_make_nobody_be_given_up(registry: Registry) -> None:
    formed(registry, 2)
    registry.join(replace(elastic(7), last_epoch=1, missing=(0, 1)), 10.0)
    registry.vanish("w1")
    registry.join(replace(elastic(8), previous="w1", last_epoch=1, missing=(0, 1)), 10.0)  # from another address
    assert registry.deadline() is None


def test_who_comes_back_meanwhile_is_waited_for_and_the_time_begins_anew_when_it_has_gone(registry: Registry) -> None:
    workers = formed(registry, 3)
    registry.join(replace(again(workers[0]), missing=(2,)), 10.0)
    for gone_s in (11.0, 500.0):
        registry.vanish("w1")
        assert not assigned(registry.tick(gone_s))
        assert registry.deadline() == gone_s + MISSED_S
        registry.resume(workers[1])
        assert registry.deadline() is None
