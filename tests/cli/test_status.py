"""What `shardnet status` finds out and prints: a real rendezvous, real endpoints, and a worker that does not answer."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shardnet.cli.table import as_json, as_text
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import EndpointUnavailable
from shardnet.histogram import Histogram
from shardnet.observation.observer import Observer
from shardnet.observation.replies import read_stats
from shardnet.observation.views import GONE, RENDEZVOUS, UNREACHABLE, UNTRUSTED, ClusterView, JobView, Steps, WorkerView
from shardnet.pb import stats_pb2
from shardnet.rendezvous.client import Membership, join
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.server import RendezvousServer
from shardnet.telemetry import Progress
from shardnet.transport.endpoint import Endpoint
from tests.credentials.made import security
from tests.shared_loop import on_shared_loop

TIMEOUTS = Timeouts.for_tests()
LATENCIES = [0, 0, 0, 0, 120, 120, *[0] * 13]  # half up to 2.5 ms, half up to 5: bounds in shardnet/histogram.py
STEPS = [*[0] * 10, 100, 20, *[0] * 7]  # most take 0.1 to 0.25 s
DEAD = "127.0.0.1:1"  # nobody can listen there


def snapshot(addresses: list[str]) -> stats_pb2.SnapshotReply:
    """A worker in the middle of a training."""
    return stats_pb2.SnapshotReply(
        role="worker",
        version="1.2.3",
        uptime_s=83.0,
        rank=0,
        world_size=len(addresses),
        epoch=1,
        addresses=addresses,
        step=120,
        progress=stats_pb2.Progress(step=120, total_steps=400, loss=2.31, tokens_per_s=45_200, exposed_share=0.12),
        collectives=[
            stats_pb2.CollectiveStats(op="all_gather", count=240, bytes=3 << 20, seconds=1.2, waited_s=0.3, failed=1, counts=LATENCIES)
        ],
        bytes_sent=3 << 20,
        bytes_received=5 << 20,
        resident_bytes=300 << 20,
        memory_peers=[1, 3],
        borrowers=[3],
        stale_chunks=7,
        routing="direct between 4 ranks",
        late=[stats_pb2.Latecomer(rank=1, count=12, seconds=3.42), stats_pb2.Latecomer(rank=2, count=1, seconds=0.001)],
        metrics="http://127.0.0.1:9464/metrics",
        steps=stats_pb2.Steps(counts=STEPS, seconds=36.0, exposed_s=9.0),
        exposed_s=9.5,
        epochs=3,
        losses=2,
        stalls=stats_pb2.Stalls(count=4, seconds=12.5),
        peers=[stats_pb2.PeerTraffic(rank=1, sent_network=2 << 20, sent_memory=1 << 20, received_network=4 << 20, received_memory=1 << 20)],
        link_bytes_per_s=117e6,
        memory=stats_pb2.Memory(peak_resident=400 << 20, shared=100 << 20),
    )


@contextlib.asynccontextmanager
async def worker(addresses: list[str]) -> AsyncIterator[str]:
    """An endpoint like a worker's; it appends its own address."""
    endpoint = Endpoint("127.0.0.1:0", limits=Limits(), timeouts=TIMEOUTS, snapshot=lambda: snapshot(addresses), security=Security())
    async with endpoint:
        endpoint.set_serving(True)
        addresses.append(endpoint.address)
        yield endpoint.address


def member(rendezvous: str, address: str, rank: int) -> Membership:
    request = JoinRequest(
        job="demo",
        incarnation=f"start of {rank}",
        address=address,
        node="laptop",
        min_world_size=2,
        max_world_size=2,
        local_rank_hint=rank,
    )
    return join(rendezvous, request, timeouts=TIMEOUTS)


@contextlib.asynccontextmanager
async def cluster_with_a_dead_worker() -> AsyncIterator[tuple[str, str, list[Membership]]]:
    """(rendezvous, address of the live worker, memberships by rank)."""
    addresses: list[str] = []
    async with RendezvousServer("127.0.0.1:0", timeouts=TIMEOUTS) as rendezvous, worker(addresses) as alive:
        addresses.append(DEAD)
        members = [member(rendezvous.address, address, rank) for rank, address in enumerate(addresses)]
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(one) for one in members))
            yield rendezvous.address, alive, members


async def look(address: str) -> ClusterView:
    return await Observer(Security(), timeout_s=5.0).look(address)


@on_shared_loop
async def test_a_rendezvous_leads_to_its_workers_and_a_dead_one_is_shown_as_unreachable() -> None:
    async with cluster_with_a_dead_worker() as (rendezvous, alive, _):
        view = await look(rendezvous)
    (job,) = view.jobs
    assert (job.job, job.state, job.epoch, job.joined) == ("demo", "running", 1, 2)
    assert [(w.rank, w.node, w.address, w.state) for w in job.workers] == [
        (0, "laptop", alive, "serving"),
        (1, "laptop", DEAD, UNREACHABLE),
    ]
    lines = as_text(view).splitlines()
    assert lines[2] == "job demo: running, epoch 1, 2 of 2 workers"
    assert lines[3] == "collectives: direct between 4 ranks"
    assert lines[4].split()[:7] == ["rank", "node", "address", "state", "step", "step", "time"]
    assert lines[5].split() == f"0 laptop {alive} serving 120/400 300.0 ms 2.310 45.2k 25% - 3.0 MiB 5.0 MiB 300.0 MiB 1*,3 240".split()
    assert lines[6].split() == f"1 laptop {DEAD} unreachable - - - - - 3.4 s - - - - -".split()


@on_shared_loop
async def test_a_member_that_is_not_trusted_is_shown_as_such() -> None:
    """Its port answers in plaintext, or its certificate has expired: the others are still shown."""
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        stranger = await stack.enter_async_context(worker(addresses))
        rendezvous = await stack.enter_async_context(
            RendezvousServer("127.0.0.1:0", timeouts=TIMEOUTS, security=security("r", Role.RENDEZVOUS))
        )
        request = JoinRequest("demo", "w0", stranger, "laptop", 1, 1)
        await stack.enter_async_context(join(rendezvous.address, request, timeouts=TIMEOUTS, security=security("laptop")))
        view = await Observer(security("me", Role.OPERATOR), timeout_s=5.0).look(rendezvous.address)
    assert [(w.address, w.state) for w in view.jobs[0].workers] == [(stranger, UNTRUSTED)]
    assert as_text(view).startswith(f"rendezvous {rendezvous.address}: serving, mutual TLS, up ")


@on_shared_loop
async def test_a_member_that_has_left_is_shown_as_gone() -> None:
    async with cluster_with_a_dead_worker() as (rendezvous, _, members):
        await members[1].aclose()
        view = await look(rendezvous)
    assert [(w.rank, w.address, w.state) for w in view.jobs[0].workers][1] == (1, DEAD, GONE)


@on_shared_loop
async def test_one_worker_is_shown_with_its_collectives() -> None:
    addresses: list[str] = []
    async with worker(addresses) as alive:
        text = as_text(await look(alive))
    place = "metrics at http://127.0.0.1:9464/metrics, rank 0 of 1, epoch 1"
    assert text.splitlines()[0] == f"worker {alive}: serving, plaintext, up 1:23, shardnet 1.2.3, {place}"
    assert text.splitlines()[1] == "collectives: direct between 4 ranks"
    assert text.splitlines()[4].split()[-2:] == ["1*,3", "240"]
    assert "* large data is copied through memory: this system does not let processes read each other's memory" in text
    assert "rank 0 has dropped 7 chunks of collectives or epochs that were over" in text
    assert text.splitlines()[-8].split() == ["all_gather", "240", "1", "3.0", "MiB", "5.00", "ms", "2.5", "ms", "4.9", "ms", "1.25", "ms"]
    assert text.splitlines()[-6:] == [
        "120 steps, half within 190.0 ms, 99 % within 485.0 ms, 25% of it waiting for communication",
        "member of 3 epochs, has lost 2 peers",
        "4 collectives were stuck, for 12.5 s in all",
        "111.6 MiB/s to the next rank when the training began",
        "memory 300.0 MiB, 100.0 MiB of it shared, at most 400.0 MiB",
        "has waited 3.4 s for rank 1",
    ]


@on_shared_loop
async def test_json_has_the_same_and_null_for_what_is_unknown() -> None:
    async with cluster_with_a_dead_worker() as (rendezvous, _, _):
        view = json.loads(as_json(await look(rendezvous)))
    alive, dead = view["jobs"][0]["workers"]
    assert alive["stats"]["progress"]["loss"] == pytest.approx(2.31)
    totals = {"count": 240, "failed": 1, "bytes": 3 << 20, "seconds": 1.2, "waited_s": 0.3, "latency": {"counts": LATENCIES}}
    assert alive["stats"]["collectives"] == {"all_gather": totals}
    assert alive["stats"]["steps"] == {"times": {"counts": STEPS}, "seconds": 36.0, "exposed_s": 9.0}
    assert alive["stats"]["peers"]["1"]["sent_network"] == 2 << 20
    assert (alive["stats"]["losses"], alive["stats"]["stalls"], alive["stats"]["peak_resident_bytes"]) == (2, 4, 400 << 20)
    assert alive["stats"]["memory_peers"] == [1, 3]
    assert alive["stats"]["late"] == {"1": 3.42, "2": 0.001}
    assert alive["stats"]["borrowers"] == [3]
    assert alive["stats"]["routing"] == "direct between 4 ranks"
    assert (dead["state"], dead["stats"]) == ("unreachable", None)


def waiting(rank: int, seconds: float, *absent: stats_pb2.AbsentRank) -> WorkerView:
    """A worker that reports waits for others."""
    stuck = stats_pb2.Stuck(collective="reduce_scatter #5046 of layers.4", seconds=seconds, absent=absent)
    stats = read_stats(stats_pb2.SnapshotReply(role="worker", rank=rank, world_size=4, waiting=[stuck] if absent else []))
    return WorkerView(rank, "n", f"10.0.0.{rank}:7000", "serving", stats)


def test_who_waits_for_whom_is_shown_once_for_all_that_say_the_same() -> None:
    behind = stats_pb2.AbsentRank(rank=2, address="10.0.0.2:7000", next_sequence=5045, last_entered="all_gather(float32 [8])")
    silent = stats_pb2.AbsentRank(rank=3, address="10.0.0.3:7000")
    workers = (waiting(0, 3.1, behind, silent), waiting(1, 3.4, behind, silent), waiting(2, 9.0, silent), waiting(3, 0.0))
    itself = workers[0].stats
    assert itself is not None
    rendezvous = replace(itself, role=RENDEZVOUS, waiting=())
    text = as_text(ClusterView("10.0.0.9:7000", "serving", rendezvous, (JobView("j", "running", 1, 4, 4, 4, workers),)))
    where = "in reduce_scatter #5046 of layers.4 for"
    assert text.splitlines()[-2:] == [
        f"ranks 0, 1 wait 3.4 s {where} rank 2 (at #5045, last entered all_gather(float32 [8])); rank 3 (10.0.0.3:7000, no answer)",
        f"rank 2 waits 9.0 s {where} rank 3 (10.0.0.3:7000, no answer)",
    ]
    alone = ClusterView("10.0.0.0:7000", "serving", itself)
    assert f"rank 0 waits 3.1 s {where} rank 2 (at #5045, " in as_text(alone)
    (told,) = json.loads(as_json(alone))["stats"]["waiting"]
    assert (told["collective"], told["seconds"]) == ("reduce_scatter #5046 of layers.4", 3.1)
    assert [(each["rank"], each["next_sequence"]) for each in told["absent"]] == [(2, 5045), (3, None)]


def test_who_was_lost_first_stands_below_the_job() -> None:
    stats = read_stats(stats_pb2.SnapshotReply(role=RENDEZVOUS))
    why = "epoch 1 lost rank 1 (10.0.0.1:7001) first: its disk is full"
    text = as_text(ClusterView("10.0.0.9:7000", "serving", stats, (JobView("j", "lost", 1, 0, 2, 2, first_lost=why),)))
    assert text.splitlines()[-2:] == ["job j: lost, epoch 1, 0 of 2 workers", why]


def test_nodes_are_shown_without_their_identity_but_for_two_of_one_name() -> None:
    boot = "a41eb7ff-a6a8-4347-ab9c-b27d667e6cfa"
    for nodes, shown in (
        (("vm/" + boot, "vm/" + boot, "left"), ["vm", "vm", "left"]),
        (("vm/" + boot, "vm/0" + boot, ""), ["vm/a41eb7ff", "vm/0a41eb7f", "-"]),
        (("rack/12345678-a", "rack/12345678-b"), ["rack/12345678-a", "rack/12345678-b"]),
    ):
        workers = tuple(replace(waiting(rank, 0.0), rank=rank, node=node) for rank, node in enumerate(nodes))
        assert workers[0].stats is not None
        rendezvous = replace(workers[0].stats, role=RENDEZVOUS)
        view = ClusterView("10.0.0.9:7000", "serving", rendezvous, (JobView("j", "running", 1, 4, 4, 4, workers),))
        assert [line.split()[1] for line in as_text(view).splitlines()[4:]] == shown
        assert [each["node"] for each in json.loads(as_json(view))["jobs"][0]["workers"]] == [*nodes]


def test_waiting_that_was_not_measured_is_a_dash_and_no_words() -> None:
    reply = snapshot(["10.0.0.0:7000"])
    reply.ClearField("exposed_s")
    reply.steps.exposed_s = reply.progress.exposed_share = 0.0
    text = as_text(ClusterView("10.0.0.0:7000", "serving", read_stats(reply)))
    assert text.splitlines()[4].split()[4:10] == ["120/400", "300.0", "ms", "2.310", "45.2k", "-"]
    assert "120 steps, half within 190.0 ms, 99 % within 485.0 ms\n" in text


def test_the_odd_numbers_of_one_worker_stop_nobody() -> None:
    strange = math.inf, math.nan, -1.0
    reply = stats_pb2.SnapshotReply(role="worker", steps=stats_pb2.Steps(seconds=1.0))
    for value in strange:
        stats = replace(
            read_stats(reply), uptime_s=value, link_bytes_per_s=value, steps=Steps(Histogram(STEPS), value, value), exposed_s=value
        )
        stats = replace(stats, stall_s=value, stalls=1, late={1: value}, progress=Progress(1, 2, value, value, value))
        assert "unknown" in as_text(ClusterView("10.0.0.0:7000", "unknown", stats))
    for counts in ([], [0] * 19):
        reply.steps.counts[:] = counts
        assert "unknown" in as_text(ClusterView("10.0.0.0:7000", "unknown", read_stats(reply)))


@on_shared_loop
async def test_a_loss_that_is_no_number_is_null_and_a_dash() -> None:
    reply = stats_pb2.SnapshotReply(role="worker", progress=stats_pb2.Progress(loss=float("nan")))
    endpoint = Endpoint("127.0.0.1:0", limits=Limits(), timeouts=TIMEOUTS, snapshot=lambda: reply, security=Security())
    async with endpoint:
        view = await look(endpoint.address)
    assert json.loads(as_json(view))["stats"]["progress"]["loss"] is None
    assert "nan" not in as_text(view)
    assert view.health == "not serving"


@on_shared_loop
async def test_nobody_at_the_address_itself_is_an_error() -> None:
    with pytest.raises(EndpointUnavailable):
        await look(DEAD)
