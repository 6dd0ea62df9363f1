"""What a rank that ends by an error tells the others."""

import asyncio
import logging
import re
import signal
import socket
from contextlib import ExitStack

import pytest
import torch

import shardnet
from shardnet.backend.loopback import LoopbackBackend
from shardnet.config import Timeouts
from shardnet.errors import PeerLost, ShardnetError
from shardnet.rendezvous.client import join, status
from shardnet.rendezvous.events import JobState
from shardnet.training.departure import Departure
from shardnet.training.last_words import LastWords
from shardnet.training.seat import Seat, begin_membership
from tests.rendezvous.builders import worker
from tests.training.workers import rendezvous


class _Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


LOST = PeerLost("rank 1 lost", 1)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad sample 17"), "its program raised ValueError: bad sample 17"),
        (ValueError("bad\n  sample\t17\n"), "its program raised ValueError: bad sample 17"),
        (ValueError("\x1b[2Jbad"), r"its program raised ValueError: \x1b[2Jbad"),
        (ValueError(), "its program raised ValueError"),
        (_Mute(), "its program raised _Mute"),
        (KeyboardInterrupt(), "its program raised KeyboardInterrupt"),
        (asyncio.CancelledError(), "its program was cancelled"),
        (BaseExceptionGroup("two", [asyncio.CancelledError(), ValueError("own")]), "its program raised ValueError: own"),
        (ExceptionGroup("two", [LOST, ExceptionGroup("one", [ValueError("own")])]), "its program raised ValueError: own"),
        (ExceptionGroup("two", [LOST]), "its program raised PeerLost: rank 1 lost"),
    ],
)
def test_of_an_error(error: BaseException, text: str) -> None:
    assert LastWords.of(error) == LastWords(text, follows="PeerLost" in text)


def test_an_error_that_comes_from_the_loss_of_another_rank_follows_from_it() -> None:
    """It may be heard of first, and must not be blamed."""
    wrapped = RuntimeError("the training failed")
    wrapped.__cause__ = LOST
    text = "its program raised RuntimeError: the training failed"
    assert LastWords.of(wrapped) == LastWords(text, follows=True)
    assert LastWords.of(ExceptionGroup("two", [wrapped, ValueError("own")])) == LastWords("its program raised ValueError: own")
    wrapped.__cause__ = ValueError("own")
    assert LastWords.of(wrapped) == LastWords(text)


def test_a_long_message_is_cut() -> None:
    text = LastWords.of(ValueError("x" * 10_000)).text
    assert len(text) < 400
    assert text.endswith("xxx…")


def test_a_signal_is_named() -> None:
    async def main() -> str:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError as error:
            words.append(LastWords.of(error))
            raise
        raise AssertionError("the signal did not come")

    words: list[LastWords] = []
    with pytest.raises(SystemExit):
        shardnet.run(main)
    assert words == [LastWords("SIGTERM has ended its program")]
    assert Departure.current().signal is None


# --- who hears them


async def fails(meeting: str, *errors: BaseException | None) -> list[str]:
    """Ranks, of which some raise an error while the others wait for them. Returns what those are told."""
    told: list[str] = []

    async def member(number: int, error: BaseException | None) -> None:
        async with shardnet.connect(
            rendezvous=meeting, min_world_size=len(errors), max_world_size=len(errors), wished_rank=number
        ) as cluster:
            await cluster.backend.barrier()
            if error is not None:
                raise error
            with pytest.raises(PeerLost) as lost:
                await cluster.backend.all_reduce(torch.ones(3))
            told.append(str(lost.value))
            raise lost.value

    outcomes = await asyncio.gather(*(member(number, error) for number, error in enumerate(errors)), return_exceptions=True)
    assert [outcome for outcome, error in zip(outcomes, errors, strict=True) if error is not None] == [each for each in errors if each]
    return told


async def test_the_others_errors_and_the_rendezvous_say_what_the_first_failure_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardnet.rendezvous")
    with rendezvous() as meeting:
        told = await fails(meeting, None, ValueError("bad sample 17"), None)
        assert len(told) == 2
        for each in told:
            assert re.search(
                r"rank 1 \(127\.0\.0\.1:\d+\) lost during all_reduce #\d+: its program raised ValueError: bad sample 17$", each
            )
        while "no worker is left" not in caplog.text:  # noqa: ASYNC110 - the rendezvous logs it
            await asyncio.sleep(0.01)
        (job,) = await status(meeting)
    assert job.state is JobState.LOST
    first = r"epoch 1 lost rank 1 \(127\.0\.0\.1:\d+\) first: its program raised ValueError: bad sample 17"
    assert re.fullmatch(first, job.first_lost)
    assert re.search(rf"none had said that the training was over; {first}\n", caplog.text)
    assert len(re.findall(r"127\.0\.0\.1:\d+ is gone: its program raised ValueError: bad sample 17\n", caplog.text)) == 1
    assert len(re.findall(r"127\.0\.0\.1:\d+ is gone: its program raised PeerLost: ", caplog.text)) == 2


async def test_the_rendezvous_says_which_ranks_could_not_reach_each_other() -> None:
    """They end before there is a cluster to leave, and an operator who asks the rendezvous must still hear more than that they are gone."""

    async def member(advertise: str) -> None:
        timeouts = Timeouts(connect_s=1.0, join_s=20.0)
        async with shardnet.connect(rendezvous=meeting, min_world_size=2, max_world_size=2, advertise=advertise, timeouts=timeouts):
            raise AssertionError("nobody can reach the first one")

    with socket.socket() as closed, rendezvous() as meeting:
        closed.bind(("127.0.0.1", 0))
        outcomes = await asyncio.gather(member(f"127.0.0.1:{closed.getsockname()[1]}"), member(""), return_exceptions=True)
        (job,) = await status(meeting)
        while job.joined:
            (job,) = await status(meeting)
    assert [type(outcome) for outcome in outcomes] == [PeerLost, PeerLost]
    assert job.state is JobState.LOST
    assert re.search(r"first: its program raised PeerLost: \[rank \d/2 epoch 1\] the mesh could not be formed: rank \d", job.first_lost)


async def test_a_rendezvous_that_is_gone_holds_up_nobody_who_fails() -> None:
    async def member(is_first: bool) -> None:
        async with shardnet.connect(rendezvous=meeting, min_world_size=2, max_world_size=2) as cluster:
            await cluster.backend.barrier()
            if is_first:
                stack.close()
            await cluster.backend.barrier()
            raise ValueError("own")

    with ExitStack() as stack:
        meeting = stack.enter_context(rendezvous())
        async with asyncio.timeout(10.0):
            outcomes = await asyncio.gather(member(True), member(False), return_exceptions=True)
    assert all(isinstance(outcome, ValueError | ShardnetError) for outcome in outcomes)


async def test_a_second_interrupt_while_the_rendezvous_is_told_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with rendezvous() as meeting:
        membership = join(meeting, worker(0, least=1, most=1))
        await begin_membership(membership)
        (backend,) = LoopbackBackend.create_group(1)
        told = asyncio.Event()
        here = asyncio.get_running_loop()

        async def never_answers(*_: object) -> None:
            here.call_soon_threadsafe(told.set)
            await asyncio.Event().wait()

        monkeypatch.setattr(membership, "_tell", never_answers)
        closing = backend.aclose
        closed: list[bool] = []

        async def close() -> None:
            await closing()
            closed.append(True)

        monkeypatch.setattr(backend, "aclose", close)
        leaving = asyncio.create_task(Seat(backend, membership.topology, membership).leave(LastWords("it was interrupted")))
        await told.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert closed == [True]
        assert membership._watch is None
