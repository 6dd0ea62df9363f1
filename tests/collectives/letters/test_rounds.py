"""Small collectives in the threads that wait for them: which these are, what they return, and which thread does the work."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.collectives.letters.attendant import Attendant
from shardnet.collectives.letters.round import Round
from shardnet.collectives.letters.rounds import Rounds
from shardnet.config import KIB, Limits
from shardnet.testing import each_rank, local_cluster, loopback_cluster
from shardnet.transport.shared_memory import futex
from tests.collectives.letters.rounds import LARGE, LIMITS, SMALL, is_round, ones_of, result_of, wait
from tests.contract.programs import Runner, random_step

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")


async def test_what_is_small_goes_by_letter_and_the_rest_as_ever() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:

        async def work(rank: Backend) -> list[bool]:
            handles: list[Pending[Any]] = [
                *(rank.all_reduce(SMALL), rank.broadcast(SMALL, 0), rank.all_gather(SMALL), rank.reduce_scatter(SMALL)),
                *(rank.all_to_all(SMALL), rank.barrier(), rank.all_gather_on_node(SMALL), rank.broadcast_on_node(SMALL.clone(), 0)),
                *(
                    rank.all_reduce(torch.ones(4 * KIB)),
                    rank.all_reduce(torch.ones(4 * KIB + 1)),
                    rank.all_to_all(SMALL, send_sizes=[2, 2], recv_sizes=[2, 2]),
                ),
            ]
            letters = [is_round(handle) for handle in handles]
            for handle in handles:
                await handle
            return letters

        assert await each_rank(ranks, work) == [[True] * 9 + [False, False]] * 2


@pytest.mark.parametrize("letter_bytes", [1024 * KIB, 256])
def test_random_programs(letter_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With letters alone, and with mailboxes that are always full: then letters go over the streams."""
    sent: list[bytes | None] = []
    announce = Rounds.announce

    def announce_round(rounds: Rounds, begun: Round, peers: Sequence[int], data: bytes | None = None) -> None:
        sent.append(data)
        announce(rounds, begun, peers, data)

    monkeypatch.setattr(Rounds, "announce", announce_round)
    asyncio.run(_run_programs(replace(LIMITS, letter_bytes=letter_bytes)))
    assert letter_bytes > 256 or sum(data is not None for data in sent) > 100


async def _run_programs(limits: Limits) -> None:
    async with local_cluster(4, limits=limits) as ranks:
        runner = Runner(ranks)
        for seed in range(40):
            rng = random.Random(seed)
            await asyncio.to_thread(runner.run, [random_step(rng, rows=40) for _ in range(30)], seed)


async def test_a_letter_is_no_larger_than_a_message_may_be() -> None:
    for limits, largest in ((Limits(eager_bytes=32), 32), (Limits(chunk_bytes=64, eager_bytes=128), 64), (LIMITS, 16 * KIB)):
        async with local_cluster(2, limits=limits) as ranks:
            mail = ranks[0]._group.mail
            assert mail is not None
            assert mail.largest == largest


@pytest.mark.parametrize("offset", [0, 1, 3])
async def test_a_result_over_the_input(offset: int) -> None:
    """The input is read in rank order, so rank 2 reads its own part last."""
    async with local_cluster(3, limits=LIMITS) as ranks, loopback_cluster(3) as reference:

        async def work(rank: Backend) -> list[torch.Tensor]:
            first, second = (torch.arange(12.0) * (rank.rank + 1) for _ in range(2))
            await rank.all_reduce(first[:8], out=first[offset : offset + 8])
            await rank.reduce_scatter(second[:9], out=second[offset : offset + 3])
            return [first, second]

        for mine, theirs in zip(await each_rank(ranks, work), await each_rank(reference, work), strict=True):
            assert all(map(torch.equal, mine, theirs))


# --- who does the work


async def test_a_thread_that_waits_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> None:
        raise AssertionError

    def work(rank: Backend) -> torch.Tensor:
        return rank.all_reduce(SMALL).wait()

    async with local_cluster(2, limits=LIMITS) as ranks:
        with monkeypatch.context() as patched:
            patched.setattr(Attendant, "take", take)
            for _ in range(100):
                results = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
                assert all(torch.equal(result, ones_of(2)) for result in results)


async def test_a_late_rank_is_slept_for() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        early = asyncio.create_task(asyncio.to_thread(ranks[0].all_reduce(SMALL).wait))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.2)
        used_s = time.process_time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.5)
        assert time.process_time() - used_s < 0.25
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await early, ones_of(2))


async def test_an_event_loop_that_awaits_goes_on_meanwhile() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        waiting = asyncio.create_task(result_of(ranks[0].all_reduce(SMALL)))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        late = ranks[1].all_reduce(SMALL)
        assert torch.equal(await waiting, await late)


async def test_callbacks_and_polling() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        called = threading.Event()
        first = ranks[0].all_reduce(SMALL)
        mapped = first.map(lambda _: called.set())
        second, polled = ranks[1].all_reduce(SMALL), ranks[1].barrier()
        assert await asyncio.to_thread(called.wait, 10.0)
        assert mapped.exception() is None
        assert torch.equal(await second, ones_of(2))
        assert not polled.done()
        other = ranks[0].barrier()
        assert polled.done()
        assert polled.exception() is None
        assert other.exception() is None


async def test_what_nobody_waits_for_is_done_in_passing() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:

        async def work(rank: Backend) -> list[Pending[torch.Tensor]]:
            handles = []
            for number in range(200):
                handles.append(rank.all_reduce(torch.full((4,), float(number))))
                if number % 20 == 0:
                    await rank.barrier()
            await rank.barrier()  # by now all letters are there
            await rank.barrier()
            return handles

        for handles in await each_rank(ranks, work):
            for number, handle in enumerate(handles):
                assert handle._future._over  # type: ignore[attr-defined]
                assert (await handle)[0] == 2.0 * number


async def test_several_threads_may_wait_for_one() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for _ in range(20):
            handle = ranks[0].all_reduce(SMALL)
            waiting = [asyncio.create_task(asyncio.to_thread(wait, handle)) for _ in range(4)]
            waiting.append(asyncio.create_task(result_of(handle)))
            await ranks[1].all_reduce(SMALL)
            assert all(torch.equal(result, ones_of(2)) for result in await asyncio.gather(*waiting))


async def test_one_thread_gives_up_and_another_gets_it() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        first = asyncio.create_task(asyncio.to_thread(handle.wait, 0.1))
        second = asyncio.create_task(asyncio.to_thread(handle.wait))
        with pytest.raises(TimeoutError):
            await first
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await second, ones_of(2))


async def test_letters_of_a_group_do_not_wait_for_those_of_another() -> None:
    """One rank is far ahead in one group, and that group's letters fill its mailbox; in another group it goes on with all others."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        pairs, trios = [rank.subgroup([0, 1]) for rank in ranks[:2]], [rank.subgroup([0, 1, 2]) for rank in ranks]
        ahead = [pairs[0].all_reduce(torch.full((4 * KIB,), float(number))) for number in range(20)]
        for _ in range(10):
            assert torch.equal((await each_rank(trios, lambda trio: trio.all_reduce(SMALL)))[2], ones_of(3))
        for number, handle in enumerate(ahead):
            assert (await pairs[1].all_reduce(torch.zeros(4 * KIB)))[0] == number
            assert (await handle)[0] == number


# --- where there are no mailboxes


@pytest.mark.parametrize("where", ["a rank that shares no memory", "switched off", "nodes of one rank"])
async def test_without_mailboxes_it_goes_as_ever(where: str) -> None:
    options: dict[str, Any] = {
        "a rank that shares no memory": {"shared_memory": lambda rank: rank != 1},
        "switched off": {"limits": replace(LIMITS, letter_bytes=0)},
        "nodes of one rank": {"ranks_per_node": 1},
    }
    async with local_cluster(3, **{"limits": LIMITS, **options[where]}) as ranks:
        handles = [rank.all_reduce(SMALL) for rank in ranks]
        assert not any(map(is_round, handles))
        assert torch.equal(await handles[0], ones_of(3))
        assert torch.equal(await handles[1], await handles[2])
        others = [ranks[rank].subgroup([0, 2]) for rank in (0, 2)]
        handles = [rank.all_reduce(SMALL) for rank in others]
        assert [is_round(handle) for handle in handles] == [where == "a rank that shares no memory"] * 2
        assert torch.equal(await handles[0], await handles[1])


async def test_what_is_found_out_at_the_beginning_is_not_counted() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        assert [(rank.telemetry.ops, rank.telemetry.bytes_sent, rank.telemetry.bytes_received) for rank in ranks] == [({}, 0, 0)] * 2
        await each_rank(ranks, lambda rank: rank.all_gather(SMALL))
        for rank in ranks:
            assert (rank.telemetry.bytes_sent, rank.telemetry.bytes_received, rank.telemetry.ops["all_gather"].bytes) == (16, 16, 16)


@pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["a round", "a stream"])
async def test_waiting_for_a_rank_that_is_late_is_counted(tensor: torch.Tensor) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        early = asyncio.create_task(result_of(ranks[0].all_reduce(tensor)))
        await asyncio.sleep(0.5)
        await ranks[1].all_reduce(tensor)
        await early
        assert ranks[0].telemetry.ops["all_reduce"].waited_s > 0.45
        assert ranks[1].telemetry.ops["all_reduce"].waited_s < 0.4
        assert [rank for rank, late in ranks[0].telemetry.late.items() if late.seconds > 0.45] == [1]
        assert all(late.seconds < 0.4 for late in ranks[1].telemetry.late.values())


async def test_the_one_that_comes_last_is_the_one_that_was_waited_for() -> None:
    """This holds whichever letter is looked for first."""
    for last in (1, 2):
        async with local_cluster(3, limits=LIMITS) as ranks:
            started = [asyncio.create_task(result_of(ranks[0].all_reduce(SMALL)))]
            await asyncio.sleep(0.1)  # not to wait for anything: it is what rank 0 has to tell, as the next one
            started.append(asyncio.create_task(result_of(ranks[3 - last].all_reduce(SMALL))))
            await asyncio.sleep(0.1)
            await ranks[last].all_reduce(SMALL)
            await asyncio.gather(*started)
            assert [rank for rank, late in ranks[0].telemetry.late.items() if late.seconds > 0.15] == [last]


async def test_what_does_not_fit_a_mailbox_goes_over_the_streams() -> None:
    async with local_cluster(2, limits=replace(LIMITS, letter_bytes=64)) as ranks:
        for length in (150, 400):
            results = await each_rank(ranks, lambda rank, n=length: rank.all_reduce(SMALL, label="x" * n))  # type: ignore[misc]
            assert torch.equal(results[0], ones_of(2))


async def test_many_more_than_may_be_outstanding() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:

        async def work(rank: Backend) -> None:
            for number, handle in enumerate([rank.all_reduce(SMALL + number) for number in range(1_000)]):
                assert torch.equal(await handle, ones_of(2, SMALL + number))

        await each_rank(ranks, work)
