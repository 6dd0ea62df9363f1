"""`Operations`: one group's collectives over streams. It numbers them, begins as many at once as the limits allow, and ends each of them.

Collectives by letter do not come here (see letters/rounds.py).
"""

import asyncio
import concurrent.futures
import time
from typing import TYPE_CHECKING, TypeVar

from shardnet.collectives.ledger import Ledger
from shardnet.collectives.operation import Algorithm, Call, Operation, Prelude
from shardnet.errors import CollectiveError, ShardnetError
from shardnet.telemetry import Track
from shardnet.wire import Chunk

if TYPE_CHECKING:
    from shardnet.collectives.group import Group

T = TypeVar("T")


class Operations:
    """Those of one group on one rank. Runs on the loop thread, except `begin` and `begin_announced`, which any thread may call."""

    def __init__(self, group: "Group", ledger: Ledger) -> None:
        self._group = group
        self._board = group.board
        self._ledger = ledger
        self._running: dict[int, Operation] = {}
        self._queued: dict[Operation, asyncio.TimerHandle] = {}  # in their order; each timer fires at the operation's deadline

    @property
    def under_way(self) -> list[Operation]:
        return list(self._running.values())

    @property
    def are_queued(self) -> bool:
        """Whether any operation waits for its turn."""
        return bool(self._queued)

    def begin(self, call: Call, algorithm: Algorithm, value: T, *, prelude: Prelude | None = None) -> "concurrent.futures.Future[T]":
        """Number a collective and hand it to the loop thread, where the algorithm begins when the `prelude`, if there is one, has ended.
        The future gives `value` when the algorithm is done."""
        with self._ledger.lock:
            return self._begin(call, algorithm, value, prelude)

    def begin_announced(self, call: Call, algorithm: Algorithm, value: T) -> "concurrent.futures.Future[T] | None":
        """`begin`, if a peer already waits for this rank in the next collective; otherwise None."""
        with self._ledger.lock:
            return self._begin(call, algorithm, value) if self._ledger.is_next_announced() else None

    def _begin(self, call: Call, algorithm: Algorithm, value: T, prelude: Prelude | None = None) -> "concurrent.futures.Future[T]":
        """Under the ledger's lock."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        result.set_running_or_notify_cancel()  # a started collective cannot be cancelled
        operation = Operation(self._group, self._ledger.draft(call), call, algorithm, value, result, prelude)
        try:
            self._ledger.take_ahead(operation.flight)
            self._board.loop.call(self._submit, operation)
        except BaseException:  # a Ctrl-C
            if self._ledger.has_given(operation.flight):
                self._board.loop.call(self._forgo, operation)
            raise
        return result

    # --- loop thread

    def on_chunk(self, source: int, chunk: Chunk) -> bool:
        """Hand a chunk to its operation, or keep it if the operation has yet to take earlier ones. Returns whether there is such an
        operation."""
        operation = self._running.get(chunk.sequence)
        if operation is None:
            return False
        if operation.ready:
            self._group.deliver(operation, source, chunk)
        else:
            self._ledger.early.keep(chunk.sequence, source, chunk)
        return True

    def fail_queued(self, error: ShardnetError) -> None:
        """Fail the operations that wait for their turn."""
        while self._queued:
            operation = self._next_queued()
            operation.fail(error)
            self._group.telemetry.flights.end(operation.flight, time.perf_counter_ns(), error)
            operation.result.set_exception(error)

    def _submit(self, operation: Operation) -> None:
        if len(self._running) >= self._board.limits.max_outstanding:
            left_s = operation.deadline - time.monotonic()
            self._queued[operation] = self._board.loop.loop.call_later(left_s, self._enter_late, operation)
        else:
            self._enter(operation)

    def _enter_late(self, operation: Operation) -> None:
        """Its time was over before its turn came: enter it only so that it fails."""
        del self._queued[operation]
        self._enter(operation)

    def _forgo(self, operation: Operation) -> None:
        """A Ctrl-C came after its number was given out. Let it fail, unless it was submitted: all other ranks would wait for it."""
        if self._ledger.is_ahead(operation.sequence) and operation not in self._queued:
            error = CollectiveError(f"{self._board.where()} {operation.name} was interrupted before it began")

            async def fail(_: Operation) -> None:
                raise error

            operation.algorithm, operation.prelude = fail, None
            self._submit(operation)

    def _enter(self, operation: Operation) -> None:
        self._ledger.enter(operation.sequence, operation.call.signature)
        operation.flight.entered_ns = time.perf_counter_ns()
        self._running[operation.sequence] = operation
        operation.task = self._board.spawn(self._run(operation))
        self._board.watch.begin()
        self._board.wake_receivers()  # the number after it may have been announced before it

    async def _run(self, operation: Operation) -> None:
        operation.started = True
        try:
            await self._attempt(operation)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the awaiter
            self._group.fail(operation, error)
        except BaseException:  # noqa: BLE001 - cancelled by fail(), whose error stays, or the process ends
            operation.fail(self._board.closed_error(operation.name))
        finally:
            self._finish(operation)

    async def _attempt(self, operation: Operation) -> None:
        group = self._group
        try:
            # the time that it waited for its turn counts, too; otherwise the operations of a queue would time out one by one
            async with asyncio.timeout(left_s := operation.deadline - time.monotonic()) as limit:
                if left_s <= 0:
                    await asyncio.Event().wait()  # its time is over: announce and send nothing, only time out
                group.check(operation)
                if operation.prelude is not None:
                    await operation.prelude()
                if not group.first_contact.is_over:
                    await group.first_contact.wait(operation)
                # The algorithm sets its sink before it first waits; only then are chunks that came early handed to it.
                self._board.loop.loop.call_soon(self._replay, operation)
                await operation.algorithm(operation)
        except TimeoutError:
            if not limit.expired():
                raise
            raise await group.diagnose(operation) from None

    def _replay(self, operation: Operation) -> None:
        operation.ready = True
        for source, chunk in self._ledger.early.take(operation.sequence):
            if operation.sequence in self._running:
                self._group.deliver(operation, source, chunk)

    def _finish(self, operation: Operation) -> None:
        del self._running[operation.sequence]
        if self._group.party.channel:
            self._board.turns.end(operation)
        operation.revoke()
        self._ledger.early.take(operation.sequence)
        if operation.error is None:
            self._board.telemetry.count_stale(operation.unheard)
        call, flight, failed, end = operation.call, operation.flight, operation.error is not None, time.perf_counter_ns()
        start, sent, telemetry = flight.entered_ns, flight.bytes_sent, self._group.telemetry
        telemetry.record(flight.name, Track.COMMUNICATION, start, end, sent)
        telemetry.count_op(call.op, call.label, start, end, sent, waited_ns=operation.waited_ns, failed=failed)
        telemetry.flights.end(flight, end, operation.error)
        if operation.error is None:
            operation.result.set_result(operation.value)
        else:
            operation.result.set_exception(operation.error)
        if self._queued and len(self._running) < self._board.limits.max_outstanding:
            self._enter(self._next_queued())

    def _next_queued(self) -> Operation:
        """Take the one that has waited longest out of the queue."""
        operation = next(iter(self._queued))
        self._queued.pop(operation).cancel()
        return operation
