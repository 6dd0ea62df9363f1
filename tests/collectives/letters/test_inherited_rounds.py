"""Handles of rounds under way in a forked child: it does no work for them, so their parent ends them as if there were no child."""

import asyncio
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from shardnet.backend import Pending
from shardnet.config import KIB
from shardnet.errors import InheritedError
from shardnet.testing import local_cluster
from shardnet.transport.shared_memory import MailboxView, futex
from tests.collectives.letters.rounds import LARGE, LIMITS, SMALL, leave_all_to_threads, ones_of, result_of
from tests.forked_child import fork, in_a_child, status_of

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")

Handles = list[Pending[torch.Tensor]]
LETTER = torch.ones(4 * KIB)  # its mailbox holds four of them
TOUCHES: dict[str, tuple[Callable[[Handles], object], str]] = {
    "drops": (lambda handles: handles.clear(), "None"),
    "asks": (lambda handles: handles[0].done(), "False"),
    "waits": (lambda handles: handles[0].wait(1.0), "InheritedError"),
    "awaits": (lambda handles: asyncio.run(result_of(handles[0])), "InheritedError"),
    "has called back": (lambda handles: handles[0].add_done_callback(print), "InheritedError"),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("tensor", [LETTER, LARGE], ids=["a letter", "a loan"])
async def test_a_child_touches_a_handle(touch: str, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did the work, it would acknowledge the other rank's letter, which would then write the next ones over it; and it would say
    that its parent has added up its part of the sum."""
    leave_all_to_threads(monkeypatch)
    work, expected = TOUCHES[touch]
    async with local_cluster(2, limits=LIMITS) as ranks:
        mine, theirs = ([rank.all_reduce(tensor)] for rank in ranks)
        outcome = in_a_child(partial(work, mine))
        theirs += [ranks[1].all_reduce(tensor) for _ in range(5)]
        mine += [ranks[0].all_reduce(tensor) for _ in range(5)]
        for handles in zip(mine, theirs, strict=True):
            for result in await both(*handles):
                assert torch.equal(result, ones_of(2, tensor))
    assert outcome == expected


async def test_a_child_knows_what_had_ended() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        mine, theirs = (rank.all_reduce(SMALL) for rank in ranks)
        await both(mine, theirs)
        said = in_a_child(lambda: (mine.done(), mine.wait().sum(), asyncio.run(result_of(mine)).sum()))
        assert said == "(True, tensor(8.), tensor(8.))"


async def test_a_child_that_is_forked_while_its_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a handler of a signal, which may return there."""
    children: list[int] = []
    async with local_cluster(2, limits=LIMITS) as ranks:
        mine, theirs = ranks[0].all_reduce(SMALL), list[Pending[torch.Tensor]]()

        def fork_instead(*_: object) -> None:
            monkeypatch.undo()
            children.append(fork())
            if children[0]:
                theirs.append(ranks[1].all_reduce(SMALL))

        monkeypatch.setattr(MailboxView, "wait", fork_instead)
        status = 1
        try:
            result = mine.wait(5.0)
        except InheritedError:
            status = 7
        finally:
            if children == [0]:
                os._exit(status)
        assert status_of(children[0]) == 7
        assert torch.equal(result, ones_of(2))
        assert torch.equal(await theirs[0], ones_of(2))


async def both(*handles: Pending[torch.Tensor]) -> list[torch.Tensor]:
    return await asyncio.gather(*(asyncio.to_thread(handle.wait, 5.0) for handle in handles))
