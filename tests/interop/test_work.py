"""Several collectives as one of torch's handles."""

import concurrent.futures
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardnet.backend import Pending
from shardnet.errors import CollectiveError
from shardnet.interop.work import PendingWork, Works

Future = concurrent.futures.Future[torch.Tensor]


@pytest.fixture
def ends() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_one_that_fails_among_others(ends: ThreadPoolExecutor) -> None:
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


def test_all_well(ends: ThreadPoolExecutor) -> None:
    futures = [Future() for _ in range(2)]
    works = Works([PendingWork(Pending(each, "all_reduce"), [torch.full((1,), 7.0)], ends) for each in futures])
    for each in futures:
        each.set_result(torch.ones(1))
    assert works.wait()
    assert (works.is_completed(), works.is_success(), works.exception()) == (True, True, None)
    assert [each.item() for each in works.result()] == [7.0, 7.0]
    assert [each.item() for each in works.get_future().wait()] == [7.0, 7.0]
