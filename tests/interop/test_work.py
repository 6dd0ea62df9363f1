"""Several collectives as one of torch's handles."""

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch

from shardnet.backend import Pending
from shardnet.errors import CollectiveError
from shardnet.interop.ends import Ends
from shardnet.interop.work import PendingWork, Works

Future = concurrent.futures.Future[torch.Tensor]


@pytest.fixture
def ends() -> Iterator[Ends]:
    threads = Ends()
    yield threads
    threads.shutdown()


def test_one_that_fails_among_others(ends: Ends) -> None:
    futures = [Future() for _ in range(3)]
    works = Works([PendingWork(Pending(each, "all_reduce"), [torch.ones(1)], ends) for each in futures])
    assert (works.is_completed(), works.is_success(), works.exception()) == (False, False, None)
    error = CollectiveError("rank 1 is gone")
    futures[1].set_exception(error)
    assert (works.is_completed(), works.exception()) == (False, error)
    futures[0].set_result(torch.ones(1))
    futures[2].set_result(torch.ones(1))
    assert (works.is_completed(), works.is_success(), works.exception()) == (True, False, error)
    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        works.wait()


def test_all_well(ends: Ends) -> None:
    futures = [Future() for _ in range(2)]
    works = Works([PendingWork(Pending(each, "all_reduce"), [torch.full((1,), 7.0)], ends) for each in futures])
    for each in futures:
        each.set_result(torch.ones(1))
    assert works.wait()
    assert (works.is_completed(), works.is_success(), works.exception()) == (True, True, None)
    assert [each.item() for each in works.result()] == [7.0, 7.0]
    assert [each.item() for each in works.get_future().wait()] == [7.0, 7.0]


def test_the_time_is_that_of_all_together(ends: Ends) -> None:
    futures = [Future() for _ in range(20)]
    works = Works([PendingWork(Pending(each, "all_reduce"), [torch.ones(1)], ends) for each in futures])
    futures[7].set_result(torch.ones(1))
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        works.wait(timedelta(seconds=0.5))
    assert 0.5 <= time.monotonic() - begin_s < 5
    for each in futures:
        if not each.done():
            each.set_result(torch.ones(1))
    assert works.wait(timedelta(seconds=0.5))


def test_callbacks_run_one_after_the_other_whatever_they_wait_for(ends: Ends) -> None:
    """They run in the order in which their futures ended; callbacks of one level never at the same time."""
    futures = [Future() for _ in range(3)]
    works = [PendingWork(Pending(each, "all_reduce"), [torch.ones(1)], ends) for each in futures]
    inner, within, seen = Future(), threading.Event(), list[str]()

    def wait_for_another(_: object) -> None:
        within.set()
        seen.append("first begins")
        PendingWork(Pending(inner, "all_reduce"), [], ends).get_future().wait()
        seen.append("first ends")

    def note(name: str, _: object) -> None:
        seen.append(name)

    first = works[0].get_future().then(wait_for_another)
    second, third = (work.get_future().then(partial(note, name)) for name, work in zip(("second", "third"), works[1:], strict=True))
    for each in futures:
        each.set_result(torch.ones(1))
    assert within.wait(10)
    inner.set_result(torch.ones(1))
    torch.futures.wait_all([first, second, third])
    assert seen == ["first begins", "first ends", "second", "third"]


def test_who_has_waited_for_a_work_has_the_value_of_its_future(ends: Ends) -> None:
    """Whichever it asked for first, and however busy the thread is that completes futures."""
    before, after = Future(), Future()
    works = [PendingWork(Pending(each, "all_reduce"), [torch.full((1,), 7.0)], ends) for each in (before, after)]
    future = works[0].get_future()
    ends.for_caller().submit(time.sleep, 0.05)
    for each in (before, after):
        each.set_result(torch.ones(1))
    works[0].wait()
    assert future.value()[0].item() == 7
    ends.for_caller().submit(time.sleep, 0.05)
    works[1].wait()
    assert works[1].get_future().value()[0].item() == 7


def test_a_callback_may_wait_for_a_work_whose_future_comes_after_it(ends: Ends) -> None:
    inner = [Future(), Future()]
    first, second = (PendingWork(Pending(each, "all_reduce"), [torch.ones(1)], ends) for each in inner)
    waited = first.get_future().then(lambda _: second.wait())
    told = second.get_future()
    for each in inner:
        each.set_result(torch.ones(1))
    assert waited.wait()
    assert told.wait()[0].item() == 1


def test_after_the_end_of_the_world_futures_end_still(ends: Ends) -> None:
    ends.shutdown()
    ended, error = Future(), Future()
    ended.set_result(torch.ones(1))
    assert PendingWork(Pending(ended, "all_reduce"), [torch.ones(1)], ends).get_future().wait()[0].item() == 1
    future = PendingWork(Pending(error, "all_reduce"), [], ends).get_future()
    error.set_exception(CollectiveError("the group is closed"))
    with pytest.raises(RuntimeError, match="the group is closed"):
        future.wait()


def test_a_result_that_cannot_be_put_in_place_fails_whoever_asks(ends: Ends) -> None:
    future = Future()

    def finish(_: object) -> None:
        raise RuntimeError("no room")

    work = PendingWork(Pending(future, "all_gather"), [], ends, finish)
    future.set_result(torch.ones(1))
    assert (work.is_completed(), work.is_success(), str(work.exception())) == (True, False, "no room")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            work.wait()
