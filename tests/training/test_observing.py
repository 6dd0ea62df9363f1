"""What the workers of a real cluster report about themselves: by gRPC, by HTTP, and when one of them dies."""

import asyncio
import queue
import signal
import socket
import time
import urllib.request
from contextlib import AsyncExitStack, ExitStack, closing

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import shardnet
from shardnet.config import Timeouts
from shardnet.errors import AddressError, PlaintextRefused
from shardnet.loop import LoopThread
from shardnet.pb import stats_pb2
from shardnet.rendezvous.client import status
from shardnet.settings import Settings
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.observe import snapshot
from tests.elastic.lessons import lesson
from tests.promises import within_s
from tests.training.workers import PATIENCE_S, Nursery, Worker, begin, rendezvous

FLIPS_WITHIN_S = within_s(1.0)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ENDED = -1


class Witness:
    """Watches the health of a worker with the standard client."""

    def __init__(self, address: str) -> None:
        self.heard: queue.Queue[tuple[int, float]] = queue.Queue()  # status and time.monotonic()
        self._watching = LoopThread.shared().run(self._watch(address))

    async def _watch(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                async for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="shardnet.v1.Mesh")):
                    self.heard.put((reply.status, time.monotonic()))
            except grpc.aio.AioRpcError:
                self.heard.put((ENDED, time.monotonic()))

    def hear(self) -> tuple[int, float]:
        return self.heard.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._watching.cancel()


@pytest.mark.timeout(120)
def test_health_says_within_a_second_that_a_peer_has_died_and_when_the_others_go_on(nursery: Nursery) -> None:
    with rendezvous() as address, ExitStack() as stack:
        learners = stack.enter_context(lesson(nursery, least=2, most=3, address=address))
        for _ in range(3):
            learners.enrol()
        learners.resumed(3)
        (job,) = LoopThread.shared().run(status(address)).result(PATIENCE_S)
        witnesses = [stack.enter_context(closing(Witness(member.address))) for member in job.members]
        assert [witness.hear()[0] for witness in witnesses] == [SERVING] * 3
        killed_s = learners.learners.pop().signal(signal.SIGKILL)
        heard = [witness.hear() for witness in witnesses]
        assert sorted(what for what, _ in heard) == [ENDED, NOT_SERVING, NOT_SERVING]
        assert max(at_s for _, at_s in heard) - killed_s < FLIPS_WITHIN_S
        survivors = [witness for witness, (what, _) in zip(witnesses, heard, strict=True) if what == NOT_SERVING]
        for learner in learners.learners:
            learners.hear(learner, "failed")
        assert [witness.hear()[0] for witness in survivors] == [SERVING] * 2
        learners.resumed(2)
        addresses = [m.address for m, (what, _) in zip(job.members, heard, strict=True) if what == NOT_SERVING]
        told = [LoopThread.shared().run(snapshot(each)).result(PATIENCE_S) for each in addresses]
        assert [(each.serving, each.epochs, each.world_size) for each in told] == [(True, 2, 2)] * 2
        assert max(each.losses for each in told) == 1  # a worker that hears of the new epoch first has itself lost nobody
        learners.end()
        assert [witness.hear()[0] for witness in survivors] == [NOT_SERVING] * 2


@pytest.mark.timeout(120)
def test_in_a_job_that_is_not_elastic_a_worker_serves_no_more_when_it_has_lost_a_peer(nursery: Nursery) -> None:
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(2)]
        begin(workers, work="stream")
        for worker in workers:
            worker.hear("streaming")
        witness = stack.enter_context(closing(Witness(workers[0].address)))
        assert witness.hear()[0] == SERVING
        killed_s = workers[1].signal(signal.SIGKILL)
        what, at_s = witness.hear()
        assert (what, at_s - killed_s < FLIPS_WITHIN_S) == (NOT_SERVING, True)
        assert workers[0].hear("left")["lost"] == workers[1].rank


async def test_a_worker_that_does_nothing_meanwhile_serves_no_more_when_it_has_lost_a_peer() -> None:
    """Its program has not noticed the loss: nothing is closed, and no collective fails."""
    settings = {"min_world_size": 2, "max_world_size": 2, "timeouts": Timeouts.for_tests()}
    with rendezvous() as address:
        async with AsyncExitStack() as stack:

            async def join() -> shardnet.Cluster:
                return await stack.enter_async_context(shardnet.connect(rendezvous=address, **settings))

            idle, other = await asyncio.gather(join(), join())
            witness = stack.enter_context(closing(Witness(idle.topology.me.address)))
            assert (await asyncio.to_thread(witness.hear))[0] == SERVING
            other.backend.abort()
            assert (await asyncio.to_thread(witness.hear))[0] == NOT_SERVING
            assert not idle.telemetry.ops


@pytest.mark.timeout(120)
def test_what_a_worker_serves_by_http_is_what_it_says_by_grpc(nursery: Nursery) -> None:
    """Nothing is left of the HTTP port: the worker itself checks that."""
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(2)]
        begin(workers, work="stream", settings={"metrics": "127.0.0.1:0", "reflection": True})
        for worker in workers:
            worker.hear("streaming")
        before = LoopThread.shared().run(snapshot(workers[0].address)).result(PATIENCE_S)
        with urllib.request.urlopen(before.metrics, timeout=PATIENCE_S) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        after = LoopThread.shared().run(snapshot(workers[0].address)).result(PATIENCE_S)
        found = {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}
        assert found["shardnet_up",] == 1
        assert (found["shardnet_epoch",], found["shardnet_world_size",]) == (before.epoch, 2)
        assert before.bytes_sent <= found["shardnet_bytes_sent_total",] <= after.bytes_sent
        counts = [{each.op: sum(each.counts) for each in reply.collectives} for reply in (before, after)]
        assert all(counts[0][op] <= found["shardnet_collective_seconds_count", op] <= counts[1][op] for op in counts[0])
        assert [{each.op: each.count for each in reply.collectives} for reply in (before, after)] == counts
        check_traffic(after)
        for worker in workers:
            worker.tell(stop=True)
        assert [worker.hear("left")["leaks"] for worker in workers] == [[], []]


def check_traffic(reply: stats_pb2.SnapshotReply) -> None:
    """Check that traffic by peer adds up to the totals, and that two workers of one machine share memory."""
    (peer,) = reply.peers
    assert peer.sent_network + peer.sent_memory == reply.bytes_sent > 0
    assert peer.received_network + peer.received_memory == reply.bytes_received > 0
    assert peer.sent_memory > 0
    assert (len(reply.nodes), list(reply.node_groups)) == (1, [0, 0])
    assert reply.memory.peak_resident >= reply.resident_bytes > reply.memory.shared > 0
    assert reply.steps.seconds > 0


async def test_a_world_of_one_has_a_port_for_metrics_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        base = free.getsockname()[1] - 1
    async with shardnet.connect(metrics=f"127.0.0.1:{base}", local_rank=1) as cluster:
        for step in range(3):
            await cluster.backend.all_reduce(torch.ones(2))
            cluster.report(step=step)
        url = f"http://127.0.0.1:{base + 1}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE_S) as page:
            lines = page.read().decode().splitlines()
    assert {"shardnet_up 1.0", "shardnet_epochs_total 1.0", "shardnet_step 2.0", "shardnet_step_seconds_count 2.0"} <= set(lines)


def test_where_metrics_may_be_and_what_the_environment_says() -> None:
    chosen = Settings.from_environment({"SHARDNET_METRICS": "127.0.0.1:9464", "SHARDNET_LOCAL_RANK": "3", "SHARDNET_REFLECTION": "1"})
    assert (chosen.metrics_address, chosen.reflection) == ("127.0.0.1:9467", True)
    assert Settings(metrics="127.0.0.1:0", local_rank=3).metrics_address == "127.0.0.1:0"
    with pytest.raises(AddressError, match="SHARDNET_METRICS: '9464'"):
        Settings.from_environment({"SHARDNET_METRICS": "9464"})
    with pytest.raises(AddressError, match=r"metrics of connect\(\): .* local rank 1 gives a port above 65535"):
        Settings.from_environment({}, metrics="127.0.0.1:65535", local_rank=1)


async def test_metrics_for_other_machines_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(PlaintextRefused, match="metrics at"):
        async with shardnet.connect(metrics="0.0.0.0:0"):
            pass


async def test_times_of_collectives_and_steps_are_distributed() -> None:
    async with shardnet.connect() as cluster:
        telemetry = cluster.telemetry
        telemetry.count_op("barrier", "", 0, 3_000_000, 0, waited_ns=0, failed=False)
        told = worker_snapshot(telemetry, cluster.topology)
    (barrier,) = (each for each in told.collectives if each.op == "barrier")
    assert [bound for bound, count in zip(told.bounds_s, barrier.counts, strict=False) if count] == [0.005]
