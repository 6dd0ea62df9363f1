"""Small collectives in the threads that wait for them: who does the work, and how what goes wrong is told."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.backend.cluster import ClusterBackend
from shardnet.collectives.attendant import Attendant
from shardnet.collectives.group import Group
from shardnet.collectives.mail import Round
from shardnet.collectives.reduction import Reduction
from shardnet.config import KIB, Limits, Timeouts
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost, ShardnetError, StateError
from shardnet.testing import each_error, each_rank, local_cluster, loopback_cluster
from shardnet.transport.shared_memory import MailboxView, futex
from shardnet.wire import Chunk
from tests.contract.programs import Runner, random_step

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")

Ranks = Sequence[ClusterBackend]
# 16 KiB by letter, of which a mailbox holds four; twice that and more otherwise
LIMITS = Limits(letter_bytes=16 * KIB)
SMALL, LARGE, LARGER = torch.ones(4), torch.ones(5_000), torch.ones(10_000)


def ones_of(ranks: int, small: torch.Tensor = SMALL) -> torch.Tensor:
    return small * ranks


def is_round(handle: Pending[Any]) -> bool:
    return isinstance(handle._future, Round)


async def test_what_is_small_goes_by_letter_and_the_rest_as_ever() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:

        async def work(rank: Backend) -> list[bool]:
            handles: list[Pending[Any]] = [
                *(rank.all_reduce(SMALL), rank.broadcast(SMALL, 0), rank.all_gather(SMALL), rank.reduce_scatter(SMALL)),
                *(rank.all_to_all(SMALL), rank.barrier(), rank.all_gather_on_node(SMALL), rank.all_reduce(torch.ones(4 * KIB))),
                *(rank.all_reduce(torch.ones(4 * KIB + 1)), rank.all_to_all(SMALL, send_sizes=[2, 2], recv_sizes=[2, 2])),
            ]
            letters = [is_round(handle) for handle in handles]
            for handle in handles:
                await handle
            return letters

        mapped = [False]  # all_gather_on_node is what all_gather becomes
        assert await each_rank(ranks, work) == [[True] * 6 + mapped + [True, False, False]] * 2


@pytest.mark.parametrize("letter_bytes", [1024 * KIB, 256])
def test_random_programs(letter_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of letters alone, and with mailboxes that are full all the time: then letters go over the streams."""
    sent: list[bytes | None] = []
    announce = Group.announce_round

    def announce_round(group: Group, begun: Round, peers: Sequence[int], data: bytes | None = None) -> None:
        sent.append(data)
        announce(group, begun, peers, data)

    monkeypatch.setattr(Group, "announce_round", announce_round)
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
    """Which is read in rank order, the own part of rank 2 last."""
    async with local_cluster(3, limits=LIMITS) as ranks, loopback_cluster(3) as reference:

        async def work(rank: Backend) -> list[torch.Tensor]:
            first, second = (torch.arange(12.0) * (rank.rank + 1) for _ in range(2))
            await rank.all_reduce(first[:8], out=first[offset : offset + 8])
            await rank.reduce_scatter(second[:9], out=second[offset : offset + 3])
            return [first, second]

        for mine, theirs in zip(await each_rank(ranks, work), await each_rank(reference, work), strict=True):
            assert all(map(torch.equal, mine, theirs))


# --- who does the work


def wait(handle: Pending[torch.Tensor]) -> torch.Tensor:
    return handle.wait()


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
        waiting = asyncio.create_task(_result(ranks[0].all_reduce(SMALL)))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        late = ranks[1].all_reduce(SMALL)
        assert torch.equal(await waiting, await late)


async def _result(handle: Pending[torch.Tensor]) -> torch.Tensor:
    return await handle


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
            waiting.append(asyncio.create_task(_result(handle)))
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
    """One rank is far ahead in one group, whose letters fill its mailbox; in another one it goes on with all others."""
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
        early = asyncio.create_task(_result(ranks[0].all_reduce(tensor)))
        await asyncio.sleep(0.2)
        await ranks[1].all_reduce(tensor)
        await early
        assert ranks[0].telemetry.ops["all_reduce"].waited_s > 0.15
        assert ranks[1].telemetry.ops["all_reduce"].waited_s < 0.1
        assert [rank for rank, late in ranks[0].telemetry.late.items() if late.seconds > 0.15] == [1]
        assert all(late.seconds < 0.1 for late in ranks[1].telemetry.late.values())


async def test_the_one_that_comes_last_is_the_one_that_was_waited_for() -> None:
    """Whichever letter is looked for first."""
    for last in (1, 2):
        async with local_cluster(3, limits=LIMITS) as ranks:
            started = [asyncio.create_task(_result(ranks[0].all_reduce(SMALL)))]
            await asyncio.sleep(0.1)  # not to wait for anything: it is what rank 0 has to tell, as the next one
            started.append(asyncio.create_task(_result(ranks[3 - last].all_reduce(SMALL))))
            await asyncio.sleep(0.1)
            await ranks[last].all_reduce(SMALL)
            await asyncio.gather(*started)
            assert [rank for rank, late in ranks[0].telemetry.late.items() if late.seconds > 0.15] == [last]


# --- what goes wrong


Call = Callable[[Backend], Pending[Any]]
MISMATCHES: dict[str, tuple[Call, Call]] = {
    "two rounds": (lambda rank: rank.all_reduce(SMALL), lambda rank: rank.all_gather(SMALL)),
    "a round and a large one": (lambda rank: rank.all_reduce(SMALL), lambda rank: rank.all_reduce(LARGE)),
    "a large one and a round": (lambda rank: rank.all_reduce(LARGE), lambda rank: rank.all_reduce(SMALL)),
    "a round and one that waits for it": (lambda rank: rank.barrier(), lambda rank: rank.all_gather_on_node(LARGER)),
    "a broadcast that nobody answers": (lambda rank: rank.broadcast(LARGE, 2), lambda rank: rank.broadcast(SMALL, 2)),
}


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("behind_s", [0.0, 0.15])
async def test_ranks_that_disagree_are_told_within_a_second(case: str, odd: int, behind_s: float) -> None:
    """Whoever is the odd one, and whoever comes first."""
    most, other = MISMATCHES[case]
    async with local_cluster(3, limits=LIMITS) as ranks:
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(3))

        async def work(rank: Backend) -> object:
            if rank.rank == odd:
                await asyncio.sleep(behind_s)
            return await (other if rank.rank == odd else most)(rank)

        start = time.monotonic()
        errors = await each_error(ranks, work)
        assert time.monotonic() - start < 1.0 + behind_s
        for error in errors:
            assert isinstance(error, CollectiveMismatch)
            assert f"rank {odd} is in" in str(error)
            assert "collective #1 of the world" in str(error)
        results = await each_rank(ranks, lambda rank: rank.all_reduce(SMALL))
        assert all(torch.equal(result, ones_of(3)) for result in results)


@pytest.mark.parametrize("threads", [True, False])
async def test_a_missing_rank_is_named_in_time(threads: bool) -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        start = time.monotonic()
        handles = [rank.all_reduce(SMALL, timeout_s=0.5) for rank in ranks[:2]]

        async def fails(handle: Pending[torch.Tensor]) -> ShardnetError:
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 of the world .* missing rank 2") as caught:
                await (asyncio.to_thread(handle.wait) if threads else _result(handle))
            return caught.value

        await asyncio.gather(*map(fails, handles))
        assert 0.5 <= time.monotonic() - start < 1.0
        with pytest.raises(CollectiveError, match="all_reduce #0 was aborted by rank"):
            await ranks[2].all_reduce(SMALL)
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[2], ones_of(3))


@pytest.mark.parametrize("told", [True, False])
async def test_a_letter_of_a_rank_that_has_given_up_is_not_used(told: bool) -> None:
    """Rank 0 gives up in the middle of rank 1's reading, so its input is its caller's again; and does not get to say so."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        given_up, late, reduce = ranks[0]._group.rounds[0], ranks[1]._group, Reduction.reduce

        def reduced(*args: Any) -> None:
            reduce(*args)
            given_up.fail(CollectiveError("rank 0 has given up"))

        theirs = ranks[1].all_reduce(SMALL, timeout_s=0.5)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Reduction, "reduce", reduced)
            assert not theirs.done()
        assert late.rounds[0]._taken_back
        with pytest.raises(CollectiveError, match="given up"):
            await handle
        if told:
            late.fail(late.rounds[0], CollectiveError("told by rank 0"))
        with pytest.raises(CollectiveError, match="told by rank 0" if told else "did not end within 0.5 s"):
            await theirs


async def test_a_letter_that_nobody_will_acknowledge_is_taken_back() -> None:
    """Rank 1, whose letter went over its stream, gives up before rank 0 begins, which hears of it when it has ended well."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        group, held, received = ranks[0]._group, [], threading.Event()
        on_chunk = group.on_chunk

        def hold_back(source: int, chunk: Chunk) -> None:
            if chunk.control is not None and chunk.control.HasField("abort"):
                held.append((source, chunk))
                received.set()
            else:
                on_chunk(source, chunk)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(group, "on_chunk", hold_back)
            patched.setattr(ranks[1]._board.mesh.mailbox, "post", lambda *_: None)
            theirs = ranks[1].all_reduce(SMALL, timeout_s=0.1)
            with pytest.raises(CollectiveTimeout):
                await theirs
            assert await asyncio.to_thread(received.wait, 10.0)
            assert torch.equal(await ranks[0].all_reduce(SMALL), ones_of(2))
        mailbox = ranks[0]._board.mesh.mailbox
        assert mailbox is not None
        assert not all(map(mailbox._is_free, mailbox._posted))
        await ranks[0]._board.loop.run_here(_call(on_chunk, *held[0]))
        assert all(map(mailbox._is_free, mailbox._posted))
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(2))


async def _call(function: Callable[..., object], *args: object) -> None:
    function(*args)


async def test_a_rank_that_is_lost_ends_what_waits_for_it() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        waiting = [asyncio.create_task(asyncio.to_thread(rank.all_reduce(SMALL).wait)) for rank in ranks[:2]]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        ranks[2].abort()
        for each in waiting:
            with pytest.raises(PeerLost, match=r"rank 2 .* lost during all_reduce #0"):
                await each
        assert time.monotonic() - start < 1.0
        with pytest.raises(PeerLost, match=r"lost during barrier #1"):  # as is what comes after
            await ranks[0].barrier()
        assert [rank._board.mesh.mailboxes[2].gone for rank in ranks[:2]] == [True, True]  # nobody waits for its receipts
        survivors = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        results = await each_rank(survivors, lambda rank: rank.all_reduce(torch.ones(4 * KIB)))
        assert torch.equal(results[0], torch.full((4 * KIB,), 2.0))
        for rank in ranks[:2]:
            rank.abort()


async def test_closing_ends_what_waits() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        waiting = asyncio.create_task(asyncio.to_thread(ranks[0].all_reduce(SMALL).wait))
        await asyncio.sleep(0.05)
        ranks[0].abort()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await ranks[0].all_reduce(SMALL)
        ranks[1].abort()


async def test_a_rank_leaves_when_what_it_has_begun_is_over() -> None:
    """Though nobody waits for it here; and a round that a rank has left without is lost."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        closing = asyncio.create_task(ranks[0].aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        assert torch.equal(await ranks[1].all_reduce(SMALL), ones_of(2))
        with pytest.raises(PeerLost, match="left the cluster"):
            await ranks[1].all_reduce(SMALL)
        await asyncio.gather(closing, ranks[1].aclose())
        assert torch.equal(await handle, ones_of(2))


async def test_ctrl_c_in_the_middle_of_it_is_told_to_the_others() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        theirs = ranks[1].all_reduce(SMALL)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Reduction, "reduce", _interrupt)
            mine = ranks[0].all_reduce(SMALL)
            with pytest.raises(KeyboardInterrupt):
                mine.wait()
        with pytest.raises(KeyboardInterrupt):
            mine.wait()  # it is over
        with pytest.raises(CollectiveError, match="aborted by rank 0"):
            await theirs
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(2))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("thread", [True, False])
async def test_a_queue_goes_on_behind_one_that_has_failed_in_it(thread: bool) -> None:
    async with local_cluster(2, timeouts=Timeouts.for_tests(), limits=replace(LIMITS, max_outstanding=2)) as ranks:
        handles = [ranks[0].all_reduce(SMALL, timeout_s=10.0) for _ in range(6)]
        waiting = asyncio.create_task(asyncio.to_thread(handles[3].wait) if thread else _result(handles[3]))
        await asyncio.sleep(0.05)
        group = ranks[0]._group
        group.board.loop.call(group.fail, group.rounds[3], CollectiveError("told"))
        with pytest.raises(CollectiveError, match="told"):
            await asyncio.wait_for(waiting, 1.0)

        async def follow(number: int) -> torch.Tensor | None:
            try:
                return await ranks[1].all_reduce(SMALL)
            except CollectiveError:
                assert number == 3
                return None

        for number in range(6):
            result = await follow(number)
            assert number == 3 or torch.equal(await handles[number], result if result is not None else SMALL)


# --- threads


async def test_who_only_asks_whether_it_is_done_is_told_in_time() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL, timeout_s=0.3)
        start = time.monotonic()
        while not handle.done():
            await asyncio.sleep(0.01)
            assert time.monotonic() - start < 1.0
        assert isinstance(handle.exception(), CollectiveTimeout)


async def test_waiting_gives_up_when_it_is_time() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(handle.wait, 0.5)
        assert 0.5 <= time.monotonic() - start < 0.9
        await ranks[1].all_reduce(SMALL)
        await handle


async def test_ctrl_c_where_one_waits_leaves_the_work_to_somebody_else() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle, sleeps, interrupted, sleep = ranks[0].all_reduce(SMALL), threading.Event(), threading.Event(), MailboxView.wait
        waiting: list[threading.Thread] = []

        def interrupted_sleep(view: MailboxView, *args: Any) -> None:
            if threading.current_thread() in waiting:
                sleeps.set()
                _interrupt(interrupted.wait(10.0))
            sleep(view, *args)

        def first_waits() -> bool:
            waiting.append(threading.current_thread())
            return _interrupted(handle)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(MailboxView, "wait", interrupted_sleep)
            first = asyncio.create_task(asyncio.to_thread(first_waits))
            assert await asyncio.to_thread(sleeps.wait, 10.0)
            second = asyncio.create_task(asyncio.to_thread(wait, handle))
            await asyncio.sleep(0.05)
            interrupted.set()
            assert await first
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await second, ones_of(2))


def _interrupted(handle: Pending[torch.Tensor]) -> bool:
    """A future passes on any error but this one."""
    try:
        handle.wait()
    except KeyboardInterrupt:
        return True
    return False


async def test_a_callback_may_not_wait_and_its_errors_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """It runs on the thread that ends a round, which others need."""
    said: list[BaseException] = []
    called = threading.Event()
    async with local_cluster(2, limits=LIMITS) as ranks:
        first, second = ranks[0].all_reduce(SMALL), ranks[0].all_reduce(SMALL)

        def wait_here(_: object) -> None:
            try:
                second.wait()
            except StateError as error:
                said.append(error)
            called.set()
            raise asyncio.CancelledError

        first.add_done_callback(wait_here)
        await ranks[1].all_reduce(SMALL)
        assert await asyncio.to_thread(called.wait, 10.0)
        assert "on a thread of shardnet's" in str(said[0])
        waiting = asyncio.create_task(_result(second))
        await asyncio.sleep(0.05)
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await waiting, ones_of(2))
        assert first.exception() is None


async def test_callbacks_do_not_run_where_somebody_asks_whether_it_is_done() -> None:
    """Who may hold a lock that the callback needs."""
    lock, order = threading.Lock(), []
    async with local_cluster(2, limits=LIMITS) as ranks:
        for _ in range(20):
            ended = threading.Event()
            first, second = ranks[0].all_reduce(SMALL), ranks[0].all_reduce(SMALL)

            def advance(_: object, other: Pending[torch.Tensor] = second, ended: threading.Event = ended) -> None:
                with lock:
                    order.append(other.done())
                    if len(order) % 2 == 0:
                        ended.set()

            first.add_done_callback(advance)
            second.add_done_callback(advance)
            theirs = [ranks[1].all_reduce(SMALL) for _ in range(2)]
            with lock:
                first.done()
                second.done()
            assert await asyncio.to_thread(ended.wait, 10.0)
            for each in (first, second, *theirs):
                assert torch.equal(await each, ones_of(2))


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


async def test_a_member_that_is_lost_before_its_group_is_known() -> None:
    """By the thread that hears of the loss: it is busy when the group is made."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        board, busy = ranks[0]._board, threading.Event()
        board.loop.call(busy.wait, 10.0)
        board.loop.call(board.on_lost, 2, "its connection broke")
        handle = ranks[0].subgroup([0, 2]).all_reduce(SMALL, timeout_s=10.0)
        start = time.monotonic()
        busy.set()
        with pytest.raises(PeerLost, match="rank 2"):
            await handle
        assert time.monotonic() - start < 1.0
        for rank in ranks:
            rank.abort()
