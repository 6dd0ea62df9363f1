"""`AnySource`: receives from whichever rank sends first.

[Note: any source] A send and its receive are a collective of two ranks, numbered on a channel of their own for each source and tag. So a
receive that names no source has no number until one is chosen. It waits until the source of some channel has announced the channel's next
number and no other receive here has claimed that number; then it becomes the receive with that number. Nothing is lost by that, because
an announcement is kept until a receive claims it, and a receive that gives up has claimed nothing.

Receives of one tag choose in the order of their calls. A receive that names its source claims the next number when it is called, so it
goes before one that still waits, whichever was called first.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardnet.collectives import verdict
from shardnet.collectives.operation import Algorithm, Call
from shardnet.errors import CollectiveTimeout, ShardnetError

if TYPE_CHECKING:
    from shardnet.collectives.group import Group
    from shardnet.collectives.switchboard import Switchboard

Begun = tuple[int, "concurrent.futures.Future[None]"]
# Makes a new error, saying why a group has ended, for each caller: an error that is raised keeps its caller's frames and their contents.
Ending = Callable[[], ShardnetError]


class AnySource:
    """The receives of one tag in a group; lives while one of them has no source. See [Note: any source]."""

    def __init__(self, board: "Switchboard", channels: Mapping[int, "Group"], at_end: Callable[[], object]) -> None:
        """channels  by the global rank of the source
        at_end    called for each receive that has a source, or has failed; loop thread
        """
        self._board = board
        self._channels = channels
        self._at_end = at_end
        self._without_source = 0  # receives, from their call on; under the lock of the caller of `begin` and `end_one`
        self._turn = asyncio.Lock()  # of the receives that wait, only the first one chooses
        self._changed = asyncio.Event()
        self._ended: Ending | None = None  # why nothing is received any more
        self.choosing = set["asyncio.Task[Any]"]()  # those that have no source yet; loop thread

    def begin(self, call: Call, algorithm: Callable[["Group"], Algorithm]) -> "concurrent.futures.Future[int]":
        """Start a receive; the future gives the global rank of its source. Any thread, one at a time.

        The future's error is PeerLost if a possible source dies, or all of them leave, and CollectiveTimeout if no rank sends in time;
        once a source is chosen, it is whatever a receive from that source raises.
        """
        result: concurrent.futures.Future[int] = concurrent.futures.Future()
        result.set_running_or_notify_cancel()  # like any collective, it cannot be cancelled
        deadline = time.monotonic() + call.timeout_s
        self._without_source += 1
        self._board.loop.call(lambda: self._board.spawn(self._run(call, algorithm, deadline, result)))
        return result

    def end_one(self) -> bool:
        """A receive has a source, or has failed. Returns whether no other receive is left without a source."""
        self._without_source -= 1
        return not self._without_source

    def wake(self) -> None:
        """Something has been announced, claimed or lost. Loop thread."""
        self._changed.set()

    def end(self, error: Ending) -> None:
        """The group has ended: fail the receives that have no source yet, and those called later. Any thread."""
        self._ended = error
        self._board.loop.call(self.wake)

    async def _run(
        self, call: Call, algorithm: Callable[["Group"], Algorithm], deadline: float, result: "concurrent.futures.Future[int]"
    ) -> None:
        try:
            source, begun = await self._choose(call, algorithm, deadline)
            await asyncio.wrap_future(begun)  # it has its own timeout: the time that is left
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the awaiter
            result.set_exception(error)
        except BaseException:  # noqa: BLE001 - the process ends
            result.set_exception(self._board.closed_error(call.op))
        else:
            result.set_result(source)

    async def _choose(self, call: Call, algorithm: Callable[["Group"], Algorithm], deadline: float) -> Begun:
        task = asyncio.current_task()
        assert task is not None
        self.choosing.add(task)
        self._board.receivers.add(self)
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as limit, self._turn:
                while (begun := self._begin_first(replace(call, timeout_s=deadline - time.monotonic()), algorithm)) is None:
                    self._check(call)
                    self._changed.clear()
                    await self._changed.wait()
                return begun
        except TimeoutError:
            if not limit.expired():
                raise
            others = [*self._channels]
            nobody = f"rank {others[0]} has not" if len(others) == 1 else f"none of ranks {', '.join(map(str, others))} has"
            detail = f"{call.op} from any source did not end within {call.timeout_s:g} s: {nobody} sent anything"
            raise CollectiveTimeout(f"{self._board.where()} {detail}", others) from None
        finally:
            self.choosing.discard(task)
            if not self.choosing:
                self._board.receivers.discard(self)
            self._at_end()

    def _begin_first(self, call: Call, algorithm: Callable[["Group"], Algorithm]) -> Begun | None:
        """Begin the receive for the send that was announced first among those that no receive has claimed; None if there is none."""
        announced = {rank: since for rank, channel in self._channels.items() if (since := channel.announced_since()) is not None}
        for rank in sorted(announced, key=announced.__getitem__):
            channel = self._channels[rank]
            if (
                begun := channel.operations.begin_announced(call, algorithm(channel), None)
            ) is not None:  # otherwise another thread has claimed it
                return rank, begun
        return None

    def _check(self, call: Call) -> None:
        """Raise if no rank can send any more, or if a rank has died that might have been about to send."""
        if self._ended is not None:
            raise self._ended()
        self._board.check_open()
        gone = [rank for rank in self._channels if rank in self._board.lost]
        dead = [rank for rank in gone if not self._board.has_taken_leave(rank)]
        if dead or len(gone) == len(self._channels):
            raise verdict.peer_lost(self._board, [*dead, *gone][0], f"{call.op} from any source")
