"""The workers of one launch, without processes."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from shardnet.cli.launch.recovery import Pauses, Recovery
from shardnet.cli.launch.supervisor import Supervisor, Verdict
from tests.cli.launch.fake_place import FakePlace

LOST = ("shardnet.errors.PeerLost: rank 1 is gone; call reform()",)
NEVER = Pauses(first_s=1e6, longest_s=1e6)


class Launch:
    """A running supervisor, and its messages."""

    def __init__(self, places: Sequence[FakePlace], recovery: Recovery | None, said: asyncio.Queue[str], **settings: float) -> None:
        self.supervisor = Supervisor(places, say=said.put_nowait, recovery=recovery, **settings)
        self.places = places
        self.said = said
        self.verdict: asyncio.Task[Verdict]


@asynccontextmanager
async def launch(
    workers: int, restarts: int | None = None, least: int = 0, pauses: Pauses | None = None, grace_s: float = 60.0, late_s: float = 60.0
) -> AsyncIterator[Launch]:
    """A launch with all workers started; it is elastic if a number of restarts is given."""
    said: asyncio.Queue[str] = asyncio.Queue()
    places = [FakePlace(f"rank {rank}") for rank in range(workers)]
    work = Launch(
        places, None if restarts is None else Recovery(restarts, least, said.put_nowait, pauses), said, grace_s=grace_s, late_s=late_s
    )
    async with asyncio.TaskGroup() as tasks:
        work.verdict = tasks.create_task(work.supervisor.run())
        for place in places:
            await place.until_started(1)
        yield work


async def test_the_first_failure_ends_all() -> None:
    async with launch(3) as work:
        work.places[1].end(7)
        verdict = await work.verdict
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.label, verdict.ended_with_it, verdict.too_few) == (7, "rank 1", 2, False)
    assert [place.signals for place in work.places] == [[signal.SIGTERM], [], [signal.SIGTERM]]


async def test_an_elastic_job_goes_on_with_the_others() -> None:
    async with launch(3, 0, least=1) as work:
        work.places[1].end(-9)
        assert await work.said.get() == ("rank 1 failed: killed by SIGKILL (the system does this when memory runs out); the others go on")
        work.places[2].end(1, tail=("ValueError: boom",))
        assert await work.said.get() == "rank 2 failed: exit code 1; the others go on. Its last line on stderr:\n    ValueError: boom"
        work.places[0].end(0)
        verdict = await work.verdict
    assert (verdict.status, verdict.failure) == (0, None)
    assert [end.label for end in verdict.lost] == ["rank 1", "rank 2"]
    assert [(place.started, place.signals) for place in work.places] == [(1, [])] * 3


async def test_who_has_died_is_replaced_as_often_as_was_asked_for() -> None:
    async with launch(2, 2, least=1) as work:
        for times in (1, 2):
            work.places[1].end(1)
            assert await work.said.get() == f"rank 1 failed: exit code 1; restarting it ({times} of 2)"
            await work.places[1].until_started(1 + times)
        work.places[1].end(1)
        assert await work.said.get() == "rank 1 failed: exit code 1; the others go on"
        work.places[0].end(0)
        verdict = await work.verdict
    assert verdict.status == 0
    assert (len(verdict.lost), len(verdict.replaced)) == (1, 2)


async def test_who_is_done_is_not_started_again() -> None:
    async with launch(2, 5) as work:
        work.places[0].end(0)
        work.places[1].end(0)
        assert await work.verdict == Verdict(0, lost=[], replaced=[])
    assert [place.started for place in work.places] == [1, 1]


async def test_who_does_not_end_with_the_others_is_named() -> None:
    """It may be frozen, or stuck after its training."""
    async with launch(4, 0, least=1, late_s=0.2) as work:
        for rank in (0, 3):
            work.places[rank].end(0)
        assert await work.said.get() == "rank 1 and rank 2 still run, 0.2 s after the last of the others has ended; Ctrl-C asks them to end"
        work.places[2].end(0)
        assert await work.said.get() == "rank 1 still runs, 0.2 s after the last of the others has ended; Ctrl-C asks it to end"
        work.supervisor.stop(signal.SIGINT)
        assert (await work.verdict).status == 128 + signal.SIGINT
    assert work.said.empty()


async def test_too_few_that_are_left_are_ended_and_the_last_straw_is_blamed() -> None:
    async with launch(4, 0, least=3) as work:
        work.places[3].end(5)
        await work.said.get()
        work.places[2].end(6)
        verdict = await work.verdict
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.label, verdict.ended_with_it, verdict.too_few) == (6, "rank 2", 2, True)
    assert work.places[0].signals == work.places[1].signals == [signal.SIGTERM]
    assert work.said.empty(), "the end tells of it"


async def test_whose_loss_the_last_one_died_of_is_blamed_rather() -> None:
    async with launch(3, 0, least=2, grace_s=0.0) as work:
        work.places[1].end(5)
        await work.said.get()
        work.places[0].end(1, tail=LOST)
        verdict = await work.verdict
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.label, verdict.ended_with_it) == (5, "rank 1", 1)


async def test_what_was_replaced_is_not_blamed() -> None:
    async with launch(1, 1, least=1) as work:
        work.places[0].end(5)
        await work.places[0].until_started(2)
        work.places[0].end(1, tail=LOST)
        verdict = await work.verdict
    assert (verdict.status, verdict.ended_with_it) == (1, 0)


async def test_a_job_of_which_nobody_is_left_here_fails_even_if_other_machines_go_on() -> None:
    async with launch(2, 0) as work:
        work.places[0].end(3)
        assert (await work.said.get()).endswith("the others go on")
        work.places[1].end(4)
        verdict = await work.verdict
    assert (verdict.status, verdict.too_few) == (4, False)
    assert work.said.empty(), "nobody here goes on"


async def test_all_must_succeed_where_all_are_needed() -> None:
    """A replacement would wait for a peer that is done."""
    async with launch(2, 5, least=2) as work:
        work.places[0].end(0)
        work.places[1].end(3)
        verdict = await work.verdict
    assert (verdict.status, work.places[1].started) == (3, 1)


async def test_nobody_is_replaced_after_a_stop() -> None:
    async with launch(2, 5, least=1) as work:
        work.supervisor.stop(signal.SIGINT)
        verdict = await work.verdict
    assert verdict == Verdict(130)
    assert work.said.empty()
    assert [(place.started, place.signals) for place in work.places] == [(1, [signal.SIGINT])] * 2


async def test_a_stop_does_not_wait_for_the_end_of_a_pause() -> None:
    async with launch(1, 2, pauses=NEVER) as work:
        work.places[0].end(1, lived_s=0.1)
        await work.places[0].until_started(2)
        while not work.said.empty():
            work.said.get_nowait()
        work.places[0].end(1, lived_s=0.1)
        assert (await work.said.get()).endswith("restarting it in 1e+06 s (2 of 2)")
        work.supervisor.stop(signal.SIGTERM)
        assert await work.verdict == Verdict(128 + signal.SIGTERM)
    assert work.places[0].started == 2


async def test_too_few_do_not_wait_for_the_end_of_a_pause() -> None:
    async with launch(3, 2, least=2, pauses=NEVER) as work:
        work.places[0].end(1, lived_s=0.1)
        await work.places[0].until_started(2)
        work.places[0].end(1, lived_s=0.1)  # a replacement would come in days
        work.places[1].end(2)
        work.places[2].end(3)
        assert (await work.verdict).status == 3
    assert [place.started for place in work.places] == [2, 1, 1]


@pytest.mark.parametrize(
    "last_line",
    [
        "shardnet.errors.StateLost: the state of step 20 (epoch 1) is lost: more workers are gone",
        "shardnet.errors.EndNotSaved: the training is over, at step 20, but the checkpoint of step 20 was not written",
    ],
)
async def test_some_errors_are_the_end_whatever_restarts_are_left(last_line: str) -> None:
    """New workers would start the training again, and the launch would end as if nothing had been lost."""
    async with launch(3, 5, least=1) as work:
        work.places[1].end(1, tail=(last_line,))
        verdict = await work.verdict
    assert verdict.failure is not None
    assert (verdict.status, verdict.failure.label, verdict.too_few) == (1, "rank 1", False)
    assert [place.started for place in work.places] == [1, 1, 1]
    assert work.said.empty()


async def test_a_checkpoint_that_cannot_be_used_is_not_the_end() -> None:
    """A file system may come back, and another one be whole."""
    async with launch(3, 5, least=1) as work:
        work.places[1].end(1, tail=("shardnet.errors.CheckpointError: none of the checkpoints in runs/lm can be used",))
        await work.places[1].until_started(2)
        for place in work.places:
            place.end(0)
        assert (await work.verdict).status == 0


async def test_nobody_is_replaced_once_a_worker_has_ended_well() -> None:
    async with launch(3, 5, least=1) as work:
        work.places[0].end(0)
        work.places[1].end(-9)
        assert (await work.said.get()).endswith("; the others go on")
        work.places[2].end(0)
        verdict = await work.verdict
    assert (verdict.status, [end.label for end in verdict.lost]) == (0, ["rank 1"])
    assert [place.started for place in work.places] == [1, 1, 1]
