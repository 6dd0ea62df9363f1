"""Silent peers, and how long their silence is tolerated."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardnet.config import KIB, MIB, Limits, Timeouts
from shardnet.errors import ProtocolError
from shardnet.transport.connection import PlainConnection
from shardnet.transport.http2 import Call, CallBroken, frames
from shardnet.transport.http2.frames import Flags, Type
from shardnet.transport.pulse import SILENT, Pulse
from tests.transport.http2.test_call import sockets

TIMEOUTS = Timeouts(suspect_s=0.2, lost_s=0.8)
PING = frames.frame(Type.PING, Flags(0), 0, bytes(8))


@contextmanager
def silent_peer() -> Iterator[tuple[Call, socket.socket]]:
    """A connection whose other end is open and says nothing."""
    near, far = sockets()
    call = Call(PlainConnection(near), Limits())
    with far:
        yield call, far
    call.close()


async def silence_s(call: Call, pulse: Pulse) -> float:
    """How long the peer's silence was tolerated."""
    begin = time.monotonic()
    async with pulse.beating(call):
        with pytest.raises(CallBroken, match="silent: it did not answer pings"):
            await call.headers()
    return time.monotonic() - begin


async def test_silence_ends_it() -> None:
    with silent_peer() as (call, _):
        assert await silence_s(call, Pulse(TIMEOUTS)) >= TIMEOUTS.lost_s


async def test_who_does_not_answer_is_silent_before_it_is_lost() -> None:
    with silent_peer() as (call, _):
        pulse = Pulse(TIMEOUTS)
        async with pulse.beating(call):
            looks = [pulse.is_silent]
            async with asyncio.timeout(TIMEOUTS.lost_s):
                while not looks[-1]:
                    await asyncio.sleep(0.01)
                    looks.append(pulse.is_silent)
            call._check()
        assert len(looks) > 1


async def test_heartbeats_are_really_sent() -> None:
    """Regression 16 of the reference: they were defined, and never sent."""
    with silent_peer() as (call, far):
        async with Pulse(TIMEOUTS).beating(call):
            received = b""
            while received.count(PING) < 3:
                received += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(far, KIB), TIMEOUTS.lost_s)
        call._check()


async def test_sooner_if_the_rendezvous_says_so_too() -> None:
    with silent_peer() as (call, _):
        pulse = Pulse(TIMEOUTS)
        pulse.suspect()
        assert TIMEOUTS.suspect_s <= await silence_s(call, pulse) < TIMEOUTS.lost_s


async def test_a_suspicion_can_be_taken_back() -> None:
    with silent_peer() as (call, _):
        pulse = Pulse(TIMEOUTS)
        pulse.suspect()
        pulse.trust()
        assert await silence_s(call, pulse) >= TIMEOUTS.lost_s


async def test_suspicion_does_not_harm_who_answers() -> None:
    near, far = sockets()
    call, peer = Call(PlainConnection(near), Limits()), Call(PlainConnection(far), Limits())
    pulse = Pulse(TIMEOUTS)
    pulse.suspect()
    async with pulse.beating(call):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * TIMEOUTS.suspect_s):
                await call.headers()
        assert not pulse.is_silent
    call.close()
    peer.close()


async def test_a_peer_that_reads_what_is_sent_is_alive() -> None:
    """It says nothing, and pings wait after the sent data, as over a slow link."""
    with silent_peer() as (call, far):
        call._writer.widen(0, 10**9)
        call._writer.set_initial_window(10**9)
        sending = asyncio.ensure_future(call.send(bytes(64 * MIB)))
        pulse = Pulse(Timeouts(suspect_s=0.2, lost_s=0.2))
        async with pulse.beating(call):
            begin = time.monotonic()
            while time.monotonic() - begin < 0.6:
                await asyncio.get_running_loop().sock_recv(far, MIB // 4)
                await asyncio.sleep(0.01)
            assert not sending.done()
        call.close()
        with pytest.raises(CallBroken, match="this rank has closed the stream"):
            await sending


async def test_a_peer_whose_large_message_trickles_in_is_alive() -> None:
    """Its bytes have arrived, but nobody is woken to read a part of a message."""
    with silent_peer() as (call, far):
        call.answer()
        call.deliver(lambda message: None)
        far.setblocking(True)
        far.sendall(
            frames.settings({}) + frames.head(4 * MIB, Type.DATA, Flags(0), 1) + b"\0" + (4 * MIB - 5).to_bytes(4) + bytes(128 * KIB)
        )
        while not call._reader.expected_bytes > MIB:  # noqa: ASYNC110 - it says nothing of that
            await asyncio.sleep(0.01)
        reads = call._read_bytes
        async with Pulse(Timeouts(suspect_s=0.2, lost_s=0.2)).beating(call):
            begin = time.monotonic()
            while time.monotonic() - begin < 0.8:
                far.sendall(b"\0")
                await asyncio.sleep(0.02)
            call._check()
        assert call._read_bytes == reads


async def test_a_peer_whose_system_takes_what_is_sent_is_alive() -> None:
    """Over a slow link everything is in the kernel's buffer with the ping after it, but the buffer empties."""
    with silent_peer() as (call, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        call._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
        call._writer.widen(0, 10**9)
        call._writer.set_initial_window(10**9)
        await call.send(bytes(2 * MIB))
        assert not call._writing
        async with Pulse(Timeouts(suspect_s=0.4, lost_s=0.4)).beating(call):
            begin = time.monotonic()
            while time.monotonic() - begin < 1.2:
                await asyncio.get_running_loop().sock_recv(far, 16 * KIB)
                await asyncio.sleep(0.02)
            assert call.outgoing_bytes
            call._check()


async def test_a_frozen_peer_whose_system_takes_pings_is_silent() -> None:
    """Its kernel acknowledges them, which is no sign of life of the process."""
    with silent_peer() as (call, _):
        await call.send(b"before it froze")
        assert await silence_s(call, Pulse(TIMEOUTS)) < 2 * TIMEOUTS.lost_s


async def test_pings_do_not_end_the_watch() -> None:
    """So much already waits for the peer that nothing more may be queued."""
    with silent_peer() as (call, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        answers = 1000 * frames.frame(Type.PING, Flags.ACK, 0, bytes(8))
        with pytest.raises(ProtocolError, match="too many control frames"):
            owe(call, answers)
        assert await silence_s(call, Pulse(TIMEOUTS)) >= TIMEOUTS.lost_s


def owe(call: Call, answers: bytes) -> None:
    while True:
        call._writer.control(answers)
        call._flush()


@pytest.mark.blocks_loop
async def test_standing_still_oneself_is_not_the_peers_silence() -> None:
    """Our own loop was held up for longer than `lost_s`, and the answers are in the socket."""
    with silent_peer() as (call, far):
        async with Pulse(TIMEOUTS).beating(call):
            await asyncio.sleep(0.1)
            far.send(frames.frame(Type.PING, Flags.ACK, 0, bytes(8)))
            time.sleep(2 * TIMEOUTS.lost_s)  # noqa: ASYNC251 - that is the case
            await asyncio.sleep(0.01)
            call._check()


def test_the_words_say_what_may_be() -> None:
    assert "frozen" in SILENT
    assert "cut" in SILENT
