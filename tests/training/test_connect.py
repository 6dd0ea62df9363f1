"""`connect()`: worlds of one in this process, members of a real cluster, and what happens to a cluster when a worker dies or freezes."""

import asyncio
import gc
import re
import signal
import threading
import time
import weakref
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardnet
from shardnet.backend import Backend
from shardnet.backend.hybrid_backend import HybridBackend
from shardnet.config import Limits, Timeouts
from shardnet.errors import ClosedError, JoinRefused, JoinTimeout, ListenError, PeerLost, PlaintextRefused, UsageError
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import join, status
from shardnet.rendezvous.request import JoinRequest
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.observe import Health, health, snapshot
from tests.training.workers import PATIENCE_S, Message, Nursery, Worker, begin, rendezvous, streaming

KILLED_WITHIN_S = 5.0  # about 0.1 s where nothing else runs
FROZEN_WITHIN_S = 8.0  # 1.5 x suspect_s, and time for a busy machine
SUSPECT_S = 2.0
TIMEOUTS = Timeouts.for_tests()


async def total(backend: Backend) -> float:
    return float((await backend.all_reduce(torch.tensor([backend.rank + 1.0])))[0])


# --- a world of one


async def test_without_a_launcher_it_is_a_world_of_one() -> None:
    async with shardnet.connect() as cluster:
        assert (cluster.rank, cluster.world_size, cluster.local_rank, cluster.topology.epoch) == (0, 1, 0, 1)
        assert await total(cluster.backend) == 1.0
        assert await cluster.mean(3.0, weight=2.0) == 3.0
        model = await cluster.shard(torch.nn.Linear(3, 1))
        await model.backward((await model(torch.ones(2, 3))).sum())
        cluster.report(step=4, total_steps=9, loss=0.5)
    assert (cluster.telemetry.step, cluster.telemetry.progress.total_steps) == (4, 9)
    with pytest.raises(ClosedError, match=r"\[rank 0/1 epoch 1 step 4\] the backend is closed"):
        cluster.backend.barrier()


async def test_a_model_that_is_still_being_made_is_closed_with_the_cluster() -> None:
    """Nobody waits for it any more; the guards see a thread that would be left."""
    begun = threading.Event()

    def init(module: torch.nn.Module) -> None:
        begun.set()
        while True:
            try:
                cluster.backend.barrier().wait()
            except ClosedError:
                return

    async with shardnet.connect() as cluster:
        making = asyncio.create_task(cluster.shard(torch.nn.Linear(3, 1, device="meta"), param_init_fn=init))
        assert await asyncio.to_thread(begun.wait, 10)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_model_that_is_dropped_is_gone_before_its_cluster(is_closed: bool) -> None:
    """For example in a search over many models."""
    async with shardnet.connect() as cluster:
        module = torch.nn.Linear(3, 1)
        model = await cluster.shard(module)
        await model.backward((await model(torch.ones(2, 3))).sum())
        if is_closed:
            await model.aclose()
        gone: list[str] = []
        weakref.finalize(module, gone.append, "module")
        weakref.finalize(model, gone.append, "model")
        del module, model
        while sorted(gone) != ["model", "module"]:  # its thread may be about to release its last call
            gc.collect()
            await asyncio.sleep(0)


async def test_a_training_is_recorded_until_the_cluster_is_left() -> None:
    async with shardnet.connect() as cluster:
        model = await cluster.shard(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = await cluster.record(model, optimizer)
        recorder.count(samples=2)
        await model.backward((await model(torch.ones(2, 3))).sum())
        await model.step(optimizer)
        assert (recorder.figures().steps, recorder.figures().samples) == (1, 2)
        assert (recorder.zero3.forward_passes, recorder.zero3.backward_passes) == (1, 1)
    optimizer.step()
    assert recorder.figures().steps == 1


async def test_an_error_in_the_block_comes_out_as_it_is_and_the_backend_is_closed() -> None:
    error = ValueError("the program's own")
    with pytest.raises(ValueError, match="the program's own") as caught:
        async with shardnet.connect() as cluster:
            raise error
    assert caught.value is error
    with pytest.raises(ClosedError):
        cluster.backend.barrier()


async def test_an_inner_connect_is_a_world_of_its_own() -> None:
    async with shardnet.connect() as outer:
        async with shardnet.connect(job="inner") as inner:
            assert inner.backend is not outer.backend
            assert await total(inner.backend) == 1.0
        with pytest.raises(ClosedError):
            inner.backend.barrier()
        assert await total(outer.backend) == 1.0
    async with shardnet.connect() as again:
        assert await total(again.backend) == 1.0


async def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDNET_ROUTNG", "ring")
    for local_rank in range(2):  # the first rank of this machine says it for all
        async with shardnet.connect(local_rank=local_rank):
            pass
    assert caplog.messages == ["nothing reads the environment variable SHARDNET_ROUTNG; did you mean SHARDNET_ROUTING?"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_nccl_without_a_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"node_engine 'nccl' \(SHARDNET_NODE_ENGINE\) is not available: .*; install torch for CUDA"):
        async with shardnet.connect(node_engine="nccl"):
            pass


async def test_a_wrong_setting_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"connect\(\) has no setting world_size"):
        async with shardnet.connect(world_size=2):
            pass
    monkeypatch.setenv("SHARDNET_ROUTING", "rinng")
    with pytest.raises(UsageError, match=r"SHARDNET_ROUTING must be one of auto, ring, direct, rank-order, got 'rinng'"):
        async with shardnet.connect():
            pass
    monkeypatch.delenv("SHARDNET_ROUTING")
    with pytest.raises(UsageError, match="min_world_size of connect\\(\\) asks for 2 workers, but without SHARDNET_RENDEZVOUS"):
        async with shardnet.connect(min_world_size=2, max_world_size=2):
            pass


# --- a cluster


def two(address: str) -> dict[str, Any]:
    """The settings of each of two members."""
    return {"rendezvous": address, "min_world_size": 2, "max_world_size": 2, "timeouts": TIMEOUTS}


async def test_a_member_may_come_again_before_others_have_left(meeting: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused until then; after that they all meet again."""

    async def member(number: int) -> None:
        for again in range(3):
            async with shardnet.connect(**two(meeting), local_rank=number) as cluster:
                await cluster.backend.barrier()
                if cluster.rank == 1 and not again:
                    while "is already running" not in caplog.text:  # noqa: ASYNC110 - the rendezvous says so, to nobody but the log
                        await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(member(0), member(1)), 30)


async def test_a_second_membership_within_the_first_is_refused_at_once(meeting: str) -> None:
    """Also where the process has been in that job before: nobody would leave it."""
    alone = two(meeting) | {"min_world_size": 1, "max_world_size": 1}
    async with shardnet.connect(**alone):
        pass
    async with shardnet.connect(**alone):
        begin_s = time.monotonic()
        with pytest.raises(JoinRefused):
            async with shardnet.connect(**alone, local_rank=1):
                pass
        assert time.monotonic() - begin_s < 5


async def test_members_of_one_process_meet_and_may_meet_again(meeting: str) -> None:
    backends: list[Backend] = []

    async def member(job: str) -> None:
        async with shardnet.connect(**two(meeting), job=job) as cluster:
            backends.append(cluster.backend)
            assert (cluster.world_size, cluster.local_rank) == (2, cluster.rank)
            assert await cluster.mean(float(cluster.rank)) == 0.5

    for job in ("first", "second"):
        await asyncio.gather(member(job), member(job))
    assert sorted(backend.rank for backend in backends) == [0, 0, 1, 1]
    for backend in backends:
        with pytest.raises(ClosedError):
            await backend.barrier()


async def test_members_whose_settings_differ_are_told_which(meeting: str) -> None:
    """Otherwise their collectives would only mismatch, one by one."""
    async with AsyncExitStack() as stack:
        members = [
            stack.enter_async_context(shardnet.connect(**two(meeting), routing=routing, limits=Limits(chunk_bytes=size)))
            for routing, size in (("auto", 4096), ("ring", 8192))
        ]
        outcomes = await asyncio.gather(*members, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, PeerLost)
    ours, theirs = "chunk_bytes 4096, routing auto", "chunk_bytes 8192, routing ring"  # in either order, whichever rank refuses first
    told = (f"the caller has {ours}, this rank has {theirs}", f"the caller has {theirs}, this rank has {ours}")
    assert any(words in str(each) for each in outcomes for words in told)


async def test_an_engine_inside_nodes(meeting: str) -> None:
    """It carries large data, and a group of the ranks has the engine, too."""

    async def member() -> None:
        async with shardnet.connect(**two(meeting), node_engine="gloo") as cluster:
            assert isinstance(cluster.backend, HybridBackend)
            large = torch.full((1_000_000,), 1.0 + cluster.rank)
            for backend in (cluster.backend, cluster.backend.subgroup([0, 1])):
                assert (await backend.all_reduce(large) == 3).all()
            assert worker_snapshot(cluster.telemetry, cluster.topology).routing.endswith(", inside nodes by gloo")

    await asyncio.gather(member(), member())


async def test_an_engine_for_a_world_of_one() -> None:
    async with shardnet.connect(node_engine="gloo") as cluster:
        assert (await cluster.backend.all_reduce(torch.ones(3))).tolist() == [1, 1, 1]


async def test_who_waits_for_a_late_member_tells_so_and_which_way_collectives_go(meeting: str) -> None:
    """Each says so in its statistics; the late one has waited for nobody."""
    entered = asyncio.Event()
    late_s = 0.3

    async def member(routing: str) -> None:
        async with shardnet.connect(**two(meeting), routing=routing) as cluster:
            if cluster.rank == 1:
                await entered.wait()
                await asyncio.sleep(late_s)  # not to wait for anything: this is the lateness that rank 0 must report
            handle = cluster.backend.all_reduce(torch.ones(10))
            entered.set()
            await handle
            told = worker_snapshot(cluster.telemetry, cluster.topology)
            wanted = {
                "auto": "direct between 2 ranks, through mailboxes in shared memory",
                "ring": "a ring of 2 ranks, small ones through mailboxes in shared memory",
            }
            assert told.routing == wanted[routing]
            (counter,) = (each for each in told.collectives if each.op == "all_reduce")
            assert (counter.waited_s > 0.9 * late_s) == (cluster.rank == 0)
            assert counter.waited_s <= counter.seconds
            assert [each.rank for each in told.late if each.seconds > 0.9 * late_s] == [1][cluster.rank :]

    for routing in ("auto", "ring"):
        entered.clear()
        await asyncio.gather(member(routing), member(routing))


async def test_a_cancelled_block_ends_at_once_and_the_others_are_told(meeting: str) -> None:
    waiting = asyncio.Event()

    async def impatient() -> None:
        async with shardnet.connect(**two(meeting)) as cluster:
            barrier = cluster.backend.barrier()  # the other one never comes
            waiting.set()
            await barrier

    async def patient() -> None:
        async with shardnet.connect(**two(meeting)) as cluster:
            receiving = cluster.backend.recv(torch.empty(1), 1 - cluster.rank)
            await waiting.wait()
            leaving.cancel()
            with pytest.raises(PeerLost, match=rf"rank {1 - cluster.rank} \(127\.0\.0\.1:\d+\) lost during recv"):
                await receiving

    leaving, staying = asyncio.create_task(impatient()), asyncio.create_task(patient())
    async with asyncio.timeout(TIMEOUTS.collective_s / 2):  # far less than the barrier would have taken to fail by itself
        await asyncio.wait([leaving, staying])
    assert leaving.cancelled()
    staying.result()


async def test_cancelled_in_the_moment_in_which_it_joins_it_gives_its_place_back(meeting: str) -> None:
    """On the loop thread it has its place already, but it has not heard of that yet."""
    loop = LoopThread.shared()
    entering = asyncio.create_task(shardnet.connect(**two(meeting)).__aenter__())
    while not await status(meeting):  # noqa: ASYNC110 - a rendezvous tells only its members
        await asyncio.sleep(0.01)
    request = JoinRequest("default", "the other one", "127.0.0.1:9", "elsewhere", 2, 2)
    other = loop.run(join(meeting, request, timeouts=TIMEOUTS).__aenter__()).result(TIMEOUTS.join_s)  # this loop does nothing meanwhile
    time.sleep(0.1)  # noqa: ASYNC251 - nor now, so that the first one has its place, too
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with asyncio.timeout(5.0):
        while len((await status(meeting))[0].members) > 1:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    await loop.run_here(other.aclose())


async def test_a_report_that_cannot_be_written_ends_nothing(meeting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = tmp_path / "nowhere" / "report"

    async def member() -> None:
        async with shardnet.connect(**two(meeting), report_file=str(nowhere)) as cluster:
            await cluster.backend.barrier()

    await asyncio.gather(member(), member())
    assert f"cannot report rank 1 to the launcher: {nowhere}: No such file or directory" in caplog.messages


async def test_what_goes_wrong_last_closes_what_was_opened(meeting: str) -> None:
    """Everything is connected by then. The peer hears of the failure at once, not after the port's drain time."""
    slow = replace(TIMEOUTS, drain_s=10.0)

    async def mute() -> None:
        with pytest.raises(ValueError, match="null byte"):
            async with shardnet.connect(**two(meeting) | {"timeouts": slow}, report_file="no name\0"):
                pass

    async def member() -> None:
        async with shardnet.connect(**two(meeting)) as cluster:
            with pytest.raises(PeerLost):
                await cluster.backend.barrier(timeout_s=slow.drain_s / 2)

    await asyncio.gather(mute(), member())


async def test_a_member_that_stays_alone_leaves_nothing_open(meeting: str) -> None:
    with pytest.raises(JoinTimeout, match="only 1 of 2 workers joined"):
        async with shardnet.connect(**two(meeting) | {"timeouts": Timeouts(join_s=0.2)}):
            pass


async def test_a_port_that_is_taken_or_open_to_others_is_refused(meeting: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {meeting}: another process already listens there"):
        async with shardnet.connect(rendezvous=meeting, listen=meeting):
            pass
    with pytest.raises(PlaintextRefused, match=r"0\.0\.0\.0:0 is not a loopback address"):
        async with shardnet.connect(rendezvous=meeting, listen="0.0.0.0"):
            pass


# --- clusters of processes


def check_survivor(said: Message, lost: Worker) -> None:
    assert (said["error"], said["lost"]) == ("PeerLost", lost.rank), said
    assert re.search(rf"\[rank \d/3 epoch 1 step \d+\] rank {lost.rank} \({re.escape(lost.address)}\) lost during ", said["message"]), said
    assert said["leaks"] == []


@pytest.mark.timeout(120)  # starts three interpreters that import torch, maybe on a slow machine
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_killed_worker_name_it_within_moments_and_end_clean(nursery: Nursery, victim: int) -> None:
    with streaming(nursery, 3) as workers:
        lost = workers.pop(victim)
        killed_s = lost.signal(signal.SIGKILL)
        for survivor in workers:
            said = survivor.hear("left")
            check_survivor(said, lost)
            assert said["failed_s"] - killed_s < KILLED_WITHIN_S
        assert [survivor.end() for survivor in workers] == [0, 0]


@pytest.mark.timeout(120)
def test_a_frozen_worker_is_lost_after_a_while_and_when_thawed_ends_with_an_error(nursery: Nursery) -> None:
    with streaming(nursery, 3, suspect_s=SUSPECT_S) as workers:
        frozen = workers.pop(1)
        frozen_s = frozen.signal(signal.SIGSTOP)
        for survivor in workers:
            said = survivor.hear("left")
            check_survivor(said, frozen)
            assert said["failed_s"] - frozen_s < FROZEN_WITHIN_S
        frozen.signal(signal.SIGCONT)
        said = frozen.hear("left", within_s=10.0)
        assert said["error"] == "PeerLost"
        assert said["lost"] in {survivor.rank for survivor in workers}
        assert said["leaks"] == []
        assert [worker.end() for worker in (*workers, frozen)] == [0, 0, 0]


@pytest.mark.timeout(120)
def test_a_worker_whose_interpreter_is_held_is_waited_for(nursery: Nursery) -> None:
    """It answers no ping for three times `suspect_s`, but its process lives, and the rendezvous hears it."""
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(2)]
        begin(workers, work="hold", seconds=3, suspect_s=1.0)
        assert [worker.hear("left")["error"] for worker in workers] == [None, None]
        assert [worker.end() for worker in workers] == [0, 0]


@pytest.mark.timeout(120)
def test_a_worker_that_trains_tells_how_far_it_is_on_its_one_port(nursery: Nursery) -> None:
    loop = LoopThread.shared()
    with streaming(nursery, 2) as workers:
        for worker in workers:
            assert loop.run(health(worker.address)).result(PATIENCE_S) is Health.SERVING
            first = loop.run(snapshot(worker.address)).result(PATIENCE_S)
            assert (first.role, first.rank, first.world_size, first.epoch) == ("worker", worker.rank, 2, 1)
            assert list(first.addresses) == [worker.address for worker in workers]
            assert first.progress.step == first.step > 0
            assert {op.op: op.failed for op in first.collectives}["all_reduce"] == 0
            assert min(first.bytes_sent, first.bytes_received, first.resident_bytes) > 0
        workers[0].tell(stop=True)
        assert [worker.hear("left")["error"] for worker in workers] == [None, None]
