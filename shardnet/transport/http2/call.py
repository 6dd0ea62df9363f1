"""`Call`: either end of one streaming gRPC call on an HTTP/2 connection of its own."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from shardnet.config import KIB, MIB, Limits
from shardnet.errors import ProtocolError
from shardnet.transport.connection import Connection
from shardnet.transport.http2 import frames, headers
from shardnet.transport.http2.frames import Flags, Setting, Type
from shardnet.transport.http2.headers import Headers, Status
from shardnet.transport.http2.reading import FrameReader, MessageReader, OnMessage
from shardnet.transport.http2.state import CallBroken, CallState
from shardnet.transport.http2.writing import FrameWriter
from shardnet.wire import Buffer

STREAM = 1  # the only one
_FRAME_BYTES = 16 * MIB - 1
_COPY_BYTES = 32 * KIB  # a message up to this size is copied and sent in passing; a larger one lends its buffer
_REQUEST_BYTES = 64 * KIB  # that a caller may send while nobody wants its messages (yet), including its pings while it waits
_MESSAGE_BYTES = 4 * KIB  # the largest single message among those bytes
_READS = 8  # at a time, or until they have brought _MESSAGES messages; then other connections get their turn
_MESSAGES = 64
_WAKE_BYTES = MIB  # of a message may lie in the system before we wake to read them: a tenth faster than 256 KiB between nodes

# The first bytes of a caller, exactly: the callee recognises by them that the caller is not grpcio (transport/front_door.py).
OPENING = frames.PREFACE + frames.settings(
    {
        Setting.SHARDNET: 1,
        Setting.ENABLE_PUSH: 0,
        Setting.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        Setting.MAX_FRAME_SIZE: _FRAME_BYTES,
    }
)
_ANSWER = frames.settings({Setting.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, Setting.MAX_FRAME_SIZE: _FRAME_BYTES})
_OPEN_CONNECTION = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)


class Call:
    """One end of the call; lives as long as its connection, which it owns. Runs on the loop that made it.

    Messages go to the function given to `deliver`, and none may come before. Everything else is awaited, and
    raises CallBroken once the connection is gone, or ProtocolError for anything that the peer may not send.
    """

    def __init__(self, connection: Connection, limits: Limits) -> None:
        """Nothing is sent yet."""
        self._read_bytes = 0
        self._connection = connection
        self._data_end = 0  # the count of bytes written to the wire up to the end of the last DATA frame
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(STREAM)
        self._messages = MessageReader(0, lambda message: None)
        self._early: list[memoryview] = []  # messages that came before anybody wanted them
        self._state = CallState(STREAM, self._writer)
        self._reader = FrameReader(STREAM, self._messages, self._state, _FRAME_BYTES)
        self._max_message_bytes = limits.max_message_bytes
        self._window_bytes = 2 * limits.chunk_bytes  # of small messages that may wait
        self._replied = False  # headers were sent
        self._allowed_bytes: int | None = None  # that the peer may still send; None: any number
        self._finished = False  # this half of the stream has ended
        self._writing = False  # the socket is full
        self._flushing = False  # the loop is about to write
        self._mute = False  # nothing can be written any more
        self._failure: Exception | None = None  # why nothing more is read
        self._broken: Exception | None = None  # why the socket is closed
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._loop.add_reader(connection.socket, self._readable)
        if connection.has_input:
            self._loop.call_soon(self._readable)

    # --- opening

    def open(self, authority: str, path: str, metadata: Headers) -> None:
        """As the caller: begin the call."""
        self._writer.control(OPENING + _OPEN_CONNECTION)
        self.send_headers(headers.request(authority, path, metadata))

    def answer(self) -> None:
        """As the callee: answer, after the caller's OPENING was read. Until `deliver` the caller may send no more than a request takes."""
        self._allowed_bytes = _REQUEST_BYTES
        self._messages.on_message, self._messages.max_bytes = self._early.append, _MESSAGE_BYTES
        ack = frames.frame(Type.SETTINGS, Flags.ACK, 0)
        self._writer.control(_ANSWER + ack + _OPEN_CONNECTION)
        self._writer.set_initial_window(frames.MAX_WINDOW)
        self._flush()

    def send_headers(self, block: Headers, *, end: bool = False) -> None:
        """Send headers before any message, or with `end` after the last one."""
        self._replied = True
        flags = Flags.END_HEADERS | (Flags.END_STREAM if end else Flags.NONE)
        frame = frames.frame(Type.HEADERS, flags, STREAM, self._state.codec.encode(block))
        if end:
            self._writer.behind(frame)
        else:
            self._writer.control(frame)
        self._flush()

    def send_status(self, status: Status) -> None:
        """As the callee: end the call."""
        block = status.trailers()
        self.send_headers(block if self._replied else headers.reply(block), end=True)

    # --- traffic

    def deliver(self, on_message: OnMessage) -> None:
        """From now on, `on_message` gets each complete message, in a buffer of its own. An exception from it ends the call.

        Raises ProtocolError if the caller has already sent a message, without waiting.
        """
        if self._early:
            raise ProtocolError(f"a message of {len(self._early[0])} bytes came before this process had accepted the call")
        self._messages.on_message = on_message
        self._messages.max_bytes = self._max_message_bytes
        self._allowed_bytes = None

    async def request(self) -> bytes:
        """The message of a caller that sends nothing else. Used instead of `deliver`; the size of what the caller sends stays bounded."""
        await self.ended()
        return b"".join(self._early)

    def hear_out(self) -> None:
        """Let the caller send as much again as it could before its request was known: mostly answers to pings."""
        self._allowed_bytes = _REQUEST_BYTES

    async def send(self, *parts: Buffer) -> None:
        """Send one message; returns when its buffers may be used again. Cancelling it sends it all the same."""
        if sum(map(len, parts)) <= _COPY_BYTES:
            while self._writer.queued_bytes >= self._window_bytes and self._broken is None and not self._finished:
                self._room.clear()
                await self._room.wait()
            self._queue(parts)
            self._flush()
            return
        self._check()
        done: asyncio.Future[None] = self._loop.create_future()
        self._writer.message([memoryview(_prefix(parts)), *(memoryview(part) for part in parts)], done)
        self._flush()
        try:
            await done
        except asyncio.CancelledError:
            self._writer.copy_unsent(done)
            raise

    def send_now(self, *parts: Buffer) -> None:
        """Send a copy of one message, without waiting for room. It goes out when the loop comes round, together with everything that is
        sent until then: a system call takes longer than all other work on this side for a small message."""
        self._queue(parts)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _queue(self, parts: Sequence[Buffer]) -> None:
        """Take a copy of one message."""
        self._check()
        self._writer.message([memoryview(b"".join((_prefix(parts), *parts)))], None)

    def end(self) -> None:
        """End this half of the stream after what was sent; messages that still wait for room are no longer sent."""
        self._finished = True
        self._writer.end()
        self._room.set()
        self._flush()

    async def headers(self) -> Headers:
        """The peer's next header block: the request, the reply's headers, or trailers."""
        await self._until(lambda: bool(self._state.headers) or self._state.ended)
        if not self._state.headers:
            raise CallBroken("it ended the stream without a status")
        return self._state.headers.popleft()

    async def ended(self) -> None:
        """Wait until the peer has ended its half."""
        await self._until(lambda: self._state.ended)

    async def broken(self) -> NoReturn:
        """Wait until nothing more can come, and raise the reason."""
        await self._until(lambda: False)
        raise AssertionError("unreachable")

    @property
    def wants_checksums(self) -> bool:
        """Whether the data of a message may arrive damaged."""
        return not self._connection.is_tamper_proof

    @property
    def signs_of_life(self) -> int:
        """A counter that grows with all bytes that come, and with the bytes of messages that the peer's system acknowledges: over a slow
        link megabytes may be on their way before a ping and its answer. Acknowledged pings do not count, because the system of a frozen
        peer acknowledges them, too."""
        acknowledged = min(self._connection.written_bytes - self._unacknowledged_bytes(), self._data_end)
        return self._read_bytes + self._unread_bytes() + acknowledged

    @property
    def outgoing_bytes(self) -> int:
        """How many bytes were sent that the peer's system does not have yet; 0 once the connection is gone."""
        return 0 if self._broken is not None else self._writer.unsent_bytes + self._unacknowledged_bytes()

    @property
    def unsent_bytes(self) -> int:
        """How many bytes were sent that this system has not taken yet, because the peer reads too slowly. 0 once the connection is gone."""
        return 0 if self._broken is not None else self._writer.unsent_bytes

    def ping(self) -> None:
        """Ask for a sign of life; do nothing while earlier control frames still wait to go out."""
        if self._writer.has_control:
            return
        self._writer.control(frames.frame(Type.PING, Flags.NONE, 0, bytes(8)))
        self._flush()

    def close(self, why: str = "this rank has closed the stream") -> None:
        """Close the socket at once. Safe to call again."""
        self._fail(CallBroken(why))

    async def linger(self, timeout_s: float) -> None:
        """Close after everything that was sent: wait a little until the peer has closed, too. Closing a socket on which unread data
        arrives would reset the connection, and the peer would lose what it has not read yet, such as the reason."""
        self._stop(CallBroken("this rank has closed the stream"))
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                while self._broken is None and (self._writing or self._writer.buffers()):
                    self._room.clear()
                    await self._room.wait()
                if self._broken is None:
                    self._connection.finish()
                    while await self._loop.sock_recv(self._connection.socket, _COPY_BYTES):
                        pass
        self.close()

    # --- the socket

    def _readable(self) -> None:
        enough = self._messages.count + _MESSAGES
        for _ in range(_READS):
            if self._failure is not None or not self._read() or self._messages.count >= enough:
                break
        if self._failure is None:
            self._connection.wake_at(min(self._reader.expected_bytes, _WAKE_BYTES))
            if self._connection.has_input:
                self._loop.call_soon(self._readable)

    def _read(self) -> bool:
        """Read once; returns whether there may be more."""
        try:
            room = self._reader.room
            count = self._connection.recv_into(room)
            if count:
                self._read_bytes += count
                self._count(count)
                self._reader.filled(count)
                if self._state.has_news:  # a waiting task need not look again after each message
                    self._changed.set()
                if self._writer.is_pending:  # answers
                    self._flush()
                return self._failure is None and count == len(room)
            self._fail(CallBroken("its connection broke (it was closed)"))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(CallBroken(f"its connection broke ({error.strerror})"))
        except CallBroken as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - any error from handling a message goes to the task that waits for the call
            self._stop(error)
        return False

    def _count(self, count: int) -> None:
        """Limit what a stranger may send: an endless stream of meaningless frames would keep the loop busy."""
        if self._allowed_bytes is not None:
            self._allowed_bytes -= count
            if self._allowed_bytes < 0:
                raise ProtocolError(f"the caller sent more than {_REQUEST_BYTES} bytes that this process did not ask for")

    def _flush(self) -> None:
        """Write what can be written."""
        self._flushing = False
        if not self._writing and not self._mute and self._broken is None:
            self._write()

    def _write(self) -> None:
        try:
            while buffers := self._writer.buffers():
                self._writer.sent(self._connection.sendmsg(buffers))
                if self._writer.sent_bytes <= self._writer.data_end:
                    self._data_end = self._connection.written_bytes
            self._connection.flush()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._connection.socket, self._write)
            self._room.set()
            return
        except OSError as error:
            self._lost_while_writing(error)
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._connection.socket)
        self._room.set()

    def _lost_while_writing(self, error: OSError) -> None:
        """Fail, but first read what the peer sent before it closed, if anyone still wants to know: it may give the reason."""
        self._mute = True  # otherwise each read would come back here to write its answers
        while self._failure is None and self._read():
            pass
        self._fail(CallBroken(f"its connection broke ({error.strerror})"))

    def _unread_bytes(self) -> int:
        return 0 if self._broken is not None else self._connection.unread_bytes

    def _unacknowledged_bytes(self) -> int:
        return 0 if self._broken is not None else self._connection.unacknowledged_bytes

    def _fail(self, error: Exception) -> None:
        """Close the socket; waiting tasks get the error. Only the first one counts."""
        if self._broken is not None:
            return
        self._stop(error)
        self._broken = error
        if self._writing:
            self._loop.remove_writer(self._connection.socket)
        self._connection.close()
        self._writer.fail(error)
        self._changed.set()
        self._room.set()

    def _stop(self, error: Exception) -> None:
        """Read no more. Waiting tasks get the error, and may still send a status."""
        if self._failure is None:
            self._failure = error
            self._loop.remove_reader(self._connection.socket)
            self._changed.set()

    def _check(self) -> None:
        """Raise if nothing can be sent any more."""
        if self._broken is not None:
            raise self._broken
        if self._finished:
            raise CallBroken("this rank has ended the stream")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()


def _prefix(parts: Sequence[Buffer]) -> bytes:
    """The prefix that gRPC puts before a message: a flag that it is not compressed, and its length."""
    return b"\0" + sum(map(len, parts)).to_bytes(4)
