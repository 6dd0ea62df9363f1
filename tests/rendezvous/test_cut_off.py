"""A rendezvous that was frozen or cut off has no connection left, and the job trains on: [Note: who may come back] in membership.py."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from shardnet.errors import JoinRefused
from shardnet.rendezvous.events import JobState
from shardnet.rendezvous.membership import Registry
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.server import RendezvousServer
from tests.rendezvous.builders import SETTLE, again, assigned, elastic, formed, worker
from tests.rendezvous.people import TIMEOUTS, Person
from tests.shared_loop import on_shared_loop


def cut_off(registry: Registry, count: int) -> None:
    for number in range(count):
        assert not assigned(registry.disconnect(f"w{number}", 20.0))


def test_nobody_begins_a_job_again_whose_workers_only_have_no_connection() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    (told,) = registry.status()
    cut_off(registry, 3)
    (lonely,) = registry.status()
    assert (lonely.state, lonely.absent) == (JobState.RUNNING, 1)
    for number in (7, 8, 9):  # new ones are faster than those that train
        assert not assigned(registry.join(elastic(number), 11.0))
    assert not assigned(registry.tick(11.0 + SETTLE))
    for number in (1, 2, 0):
        registry.resume(workers[number])
    assert replace(registry.status()[0], joined=3) == told
    assert registry.deadline() is None


def test_the_workers_of_a_job_that_is_not_elastic_may_come_back_too() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = [worker(number) for number in range(2)]
    for each in workers:
        registry.join(each, 0.0)
    cut_off(registry, 2)
    with pytest.raises(JoinRefused, match="1 of its workers have no connection to the rendezvous now") as refused:
        registry.join(worker(7), 11.0)
    assert refused.value.reason == Refusal.ABSENT
    for each in workers:
        registry.resume(each)
    assert (registry.status()[0].joined, registry.status()[0].absent) == (2, 0)


def test_they_are_given_up_when_their_time_is_over() -> None:
    registry = Registry(settle_s=SETTLE)
    formed(registry, 3)
    cut_off(registry, 3)
    for number in (7, 8):
        registry.join(elastic(number), 11.0)
    assert registry.deadline() == 20.0
    assert {name: world.epoch for name, world in assigned(registry.tick(20.0)).items()} == {"w7": 2, "w8": 2}
    assert not registry.is_member("w2")


def test_a_worker_that_was_started_in_place_of_one_knows_that_it_is_gone() -> None:
    """Otherwise the only worker of a job could be replaced only after a while."""
    registry = Registry(settle_s=SETTLE)
    (one,) = formed(registry, 1, least=1)
    cut_off(registry, 1)
    elsewhere = replace(elastic(7, least=1), node="another", replacement=True)
    assert not assigned(registry.join(elsewhere, 11.0))
    assert registry.is_member("w0")
    after = replace(one, incarnation="w0+", address="10.0.0.1:7100", replacement=True)
    assert {world.epoch for world in assigned(registry.join(after, 11.0)).values()} == {2}
    assert not registry.is_member("w0")


def test_workers_that_were_started_in_place_of_others_begin_together() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = [replace(elastic(number, most=3), local_rank_hint=number) for number in range(3)]
    for each in workers:
        registry.join(each, 0.0)
    cut_off(registry, 3)
    notices = [
        registry.join(replace(each, incarnation=f"{each.incarnation}+", address=f"10.0.0.1:71{number}", replacement=True), 11.0)
        for number, each in enumerate(workers)
    ]
    assert [assigned(each).keys() for each in notices] == [set(), set(), {"w0+", "w1+", "w2+"}]


def test_a_worker_that_once_was_started_in_place_of_one_does_not_replace_itself() -> None:
    """When it joins for the next epoch, all others have done so, and its own membership is absent."""
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    cut_off(registry, 3)
    for number in (0, 1):
        assert not assigned(registry.join(again(workers[number]), 11.0))
    assert assigned(registry.join(replace(again(workers[2]), replacement=True), 11.0)).keys() == {"w0+", "w1+", "w2+"}


def test_who_was_started_in_place_of_one_and_is_refused_changes_nothing() -> None:
    registry = Registry(settle_s=SETTLE)
    (one,) = formed(registry, 1, least=1)
    cut_off(registry, 1)
    waiting = elastic(7, least=1)
    registry.join(waiting, 11.0)
    with pytest.raises(JoinRefused, match="asks for 1 to 9"):
        registry.join(replace(one, incarnation="w0+", address="10.0.0.1:7100", max_world_size=9, replacement=True), 11.0)
    assert registry.is_member("w0")
    assert assigned(registry.tick(20.0)).keys() == {"w7"}


def test_who_was_given_a_place_but_has_not_heard_of_it_hears_again() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 2)
    (told,) = registry.status()
    cut_off(registry, 2)
    worlds = assigned(registry.join(workers[1], 11.0))
    assert {name: (world.epoch, world.rank, len(world.members)) for name, world in worlds.items()} == {"w1": (1, 1, 2)}
    registry.resume(workers[0])
    assert registry.status() == (told,)
    with pytest.raises(JoinRefused) as refused:
        registry.join(workers[1], 11.0)
    assert refused.value.reason == Refusal.DUPLICATE_INCARNATION, "it is connected"


@pytest.mark.parametrize("same", [{"local_rank_hint": 1}, {"address": "10.0.0.1:7001"}], ids=["worker", "address"])
def test_a_job_that_is_started_again_by_hand_waits_until_the_one_before_is_given_up(same: dict[str, Any]) -> None:
    registry = Registry(settle_s=SETTLE)
    for number in range(2):
        registry.join(replace(worker(number, hint=number), identity="one machine"), 0.0)
    cut_off(registry, 2)
    with pytest.raises(JoinRefused) as refused:
        registry.join(replace(worker(7, hint=7), identity="one machine", **same), 11.0)
    assert refused.value.reason == Refusal.ABSENT


def test_who_joins_again_does_not_wait_for_the_last_one_that_died() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    for number in (0, 1):
        registry.join(again(workers[number]), 11.0)
    assert assigned(registry.disconnect("w2", 20.0)).keys() == {"w0+", "w1+"}


def test_nobody_waits_for_a_worker_that_vanishes_when_the_training_has_ended() -> None:
    registry = Registry(settle_s=SETTLE)
    formed(registry, 2)
    registry.leave("job", "w0")
    registry.disconnect("w1", 20.0)
    assert registry.is_done
    for number in (7, 8):
        registry.join(elastic(number), 11.0)
    assert {world.epoch for world in assigned(registry.tick(11.0 + SETTLE)).values()} == {2}, "others may begin it again"


@on_shared_loop
async def test_a_job_of_which_nobody_comes_back_is_lost_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardnet.rendezvous.service")
    async with RendezvousServer("127.0.0.1:0", timeouts=replace(TIMEOUTS, lost_s=2.5), settle_s=SETTLE) as server:
        before = [Person(server.address, elastic(number)) for number in range(2)]
        for person in before:
            await person.joined
        for person in before:
            await person.die()
        async with asyncio.timeout(20.0):
            while "vanished, and no other worker is connected; they have 2.5 s to come back" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "job job: lost" not in caplog.text
            while "job job: lost in epoch 1: no worker is left" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
