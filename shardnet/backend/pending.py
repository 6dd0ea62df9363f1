"""`Pending`: the awaitable handle of a collective."""

import asyncio
import concurrent.futures
import logging
import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, Self, TypeVar

from torch.autograd import profiler

from shardnet.errors import ClosedError, StateError
from shardnet.loop import LoopThread
from shardnet.uncompiled import uncompiled

log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
Arrival = Callable[[], None]


@uncompiled
class Pending(Generic[T]):
    """The result of a collective that is under way. Await it on any event loop, or `wait()` in any thread.

    The collective started when the handle was made, and runs to its end whatever becomes of the handle: cancelling an
    `await` cancels the waiting, not the collective. Awaiting or waiting again gives the same result or error. Dropping a
    handle that nobody waited for is a ResourceWarning, since its error, if any, is lost with it; if the collective has failed by then,
    the error is logged.

    The tensors given to the collective belong to it until the handle is done: read them, but do not write.

    [Note: results on a GPU] A result on a GPU is ready in stream order: the handle is done once the last bytes are on their way, and `wait`
    and `await` make work queued on the current stream from then on wait for them. No thread waits. Use the result on that stream, or make
    your own stream wait for that one.
    """

    __slots__ = ("__weakref__", "_arrival", "_function", "_future", "_retrieved", "_waiters", "op_name")

    def __init__(self, future: "concurrent.futures.Future[T]", op_name: str, arrival: Arrival | None = None) -> None:
        """`arrival` makes the current stream wait for a result on a GPU; it is called after `future` has ended well."""
        self._future: concurrent.futures.Future[Any] = future
        self._arrival = arrival
        self._function: Callable[[Any], T] | None = None  # makes this handle's result from the future's
        self._waiters: set[asyncio.Future[None]] | None = None  # of the awaits that are under way; made by the first
        self.op_name = op_name
        self._retrieved = False  # last: `__del__` needs the rest

    @classmethod
    def done_with(cls, value: T, op_name: str) -> "Pending[T]":
        """A handle that is done already."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_result(value)
        pending = cls(future, op_name)
        pending._retrieved = True  # nothing can be lost with it
        return pending

    def arrives(self, arrival: Arrival) -> None:
        """Set `arrival`, for a result on a GPU; for the code that has made the handle."""
        self._arrival = arrival

    def quietly(self) -> Self:
        """Return this handle, which then gives no warning when it is dropped: its owner may look at it later, or never."""
        self._retrieved = True
        return self

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block this thread until the result is there. torch's profiler, if it is on, shows how long that takes.

        Raises TimeoutError after `timeout_s` (the collective goes on), or the collective's own error; StateError on
        shardnet's own threads, where callbacks run: waiting could block them for ever.
        """
        self._may_block()
        try:
            result = self._blocked(timeout_s)
        except TimeoutError as error:
            if error.args:  # the collective's own
                raise
            raise TimeoutError(
                f"{self.op_name} was not done within {timeout_s:g} s; the operation goes on, and you can wait for it again"
            ) from None
        return self._read(result)

    def exception(self) -> BaseException | None:
        """The error of the collective, or None. Blocks until it is done, as `wait` does."""
        self._may_block()
        error = self._future.exception()
        if error is None and self._arrival is not None:
            self._arrival()
        return error

    def add_done_callback(self, callback: Callable[["Pending[T]"], None]) -> None:
        """Call `callback(self)` once done, on whichever thread finishes it (at once if it is done)."""
        waiting = [self]  # emptied by the call: a future keeps its callbacks when it is done, which would refer to it and to its result
        self._future.add_done_callback(lambda _: callback(waiting.pop()))

    def map(self, function: Callable[[T], U]) -> "Pending[U]":
        """A handle for `function(result)`. `function` runs on the thread that finishes the collective: keep it short, and do not read a
        result on a GPU there, because it may still be on its way."""
        self._retrieved = True
        mapped: concurrent.futures.Future[U] = concurrent.futures.Future()
        make = self._followed_by(function)

        def finish(done: "concurrent.futures.Future[Any]") -> None:
            try:
                mapped.set_result(make(done.result()))
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the awaiter
                mapped.set_exception(error)

        self._future.add_done_callback(finish)
        return Pending(mapped, self.op_name, self._arrival)

    def read_as(self, function: Callable[[T], U]) -> "Pending[U]":
        """A handle of the same collective for `function(result)`, which each `wait` and `await` calls again, in its own thread.

        A thread that waits for it waits for the collective itself and may do its work; with `map` another thread does that work.
        """
        self._retrieved = True
        pending: Pending[U] = Pending(self._future, self.op_name, self._arrival)
        pending._function = self._followed_by(function)
        return pending

    def __await__(self) -> Generator[Any, None, T]:
        self._retrieved = True
        if self._future.done():
            return self._read(self._future.result())
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters
        if waiters is None:  # in two threads at once, perhaps: then each has a set and a callback of its own
            waiters = {arrived}
            self._future.add_done_callback(partial(_wake, waiters))
            self._waiters = waiters
        else:
            waiters.add(arrived)
            if self._future.done():  # the others may have been woken before this one was among them
                arrived.set_result(None)
        try:
            yield from arrived
        finally:
            waiters.discard(arrived)  # a cancelled await leaves nothing behind, however often somebody gives up and awaits again
        return self._read(self._future.result())

    def _blocked(self, timeout_s: float | None) -> Any:
        if profiler._is_profiler_enabled and not self._future.done():
            with profiler.record_function(f"shardnet: wait for {self.op_name}"):
                return self._future.result(timeout_s)
        return self._future.result(timeout_s)

    def _read(self, result: Any) -> T:
        if self._arrival is not None:
            self._arrival()
        return result if self._function is None else self._function(result)

    def _followed_by(self, function: Callable[[T], U]) -> Callable[[Any], U]:
        first = self._function
        return function if first is None else lambda result: function(first(result))

    def _may_block(self) -> None:
        self._retrieved = True
        if not self._future.done() and not LoopThread.shared().may_block():
            raise StateError(
                f"{self.op_name} cannot be waited for on one of shardnet's own threads, which may have to finish the operation; use await"
            )

    def __del__(self) -> None:
        if not getattr(self, "_retrieved", True):  # a Ctrl-C may have come before __init__ was through
            error = self._future.exception() if self._future.done() else None
            if error is not None and not isinstance(error, ClosedError):  # closing also ends collectives that nobody waits for any more
                log.error("%s has failed, and was never awaited: %s", self.op_name, error)
            warnings.warn(f"{self.op_name} was never awaited; its result or error is lost", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Pending {self.op_name} {'done' if self.done() else 'under way'}>"


def _wake(waiters: set[asyncio.Future[None]], _: object) -> None:
    """Wake all awaits of a handle, on their own loops. More may come and go meanwhile."""
    while waiters:
        try:
            arrived = waiters.pop()
            arrived.get_loop().call_soon_threadsafe(_arrive, arrived)
        except (KeyError, RuntimeError):  # the last one has just gone; its loop was closed, so nobody is left to wake
            continue


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():  # the await may have been cancelled
        arrived.set_result(None)
