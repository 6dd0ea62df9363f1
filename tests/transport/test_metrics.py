"""Statistics over HTTP: a Prometheus parser reads what the snapshot says, and the port answers nothing else."""

import asyncio
import math
import socket
import sys

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from shardnet.errors import ListenError, PlaintextRefused, UsageError
from shardnet.histogram import BOUNDS_S
from shardnet.pb import stats_pb2
from shardnet.transport.metrics_port import MetricsPort
from tests.http_calls import get, knock, say
from tests.shared_loop import on_shared_loop

BUCKETS = len(BOUNDS_S) + 1
WORKER = stats_pb2.SnapshotReply(
    role="worker",
    version="1.2.3",
    serving=True,
    uptime_s=12.5,
    rank=1,
    world_size=4,
    epoch=3,
    step=120,
    progress=stats_pb2.Progress(step=120, total_steps=400, loss=2.5, tokens_per_s=45_200),
    bounds_s=BOUNDS_S,
    collectives=[
        stats_pb2.CollectiveStats(op="all_gather", count=6, failed=1, bytes=1 << 20, seconds=1.5, waited_s=0.5, counts=[1, 2, *[0] * 16, 3])
    ],
    steps=stats_pb2.Steps(counts=[0, 0, 4, *[0] * (BUCKETS - 3)], seconds=8.0, exposed_s=2.0),
    bytes_sent=7,
    exposed_s=2.25,
    epochs=3,
    losses=2,
    late=[stats_pb2.Latecomer(rank=2, count=5, seconds=0.75)],
    stalls=stats_pb2.Stalls(count=1, seconds=3.5),
    peers=[stats_pb2.PeerTraffic(rank=0, sent_network=1, sent_memory=2, received_network=3, received_memory=4)],
    resident_bytes=300,
    memory=stats_pb2.Memory(peak_resident=400, shared=100, device_allocated=5, device_reserved=6, device_peak=7),
)
RENDEZVOUS = stats_pb2.SnapshotReply(
    role="rendezvous", serving=True, jobs=[stats_pb2.Job(name="lm", state="running", epoch=2, joined=3, min_world_size=2, max_world_size=4)]
)


def port(reply: stats_pb2.SnapshotReply = WORKER, listen: str = "127.0.0.1:0") -> MetricsPort:
    return MetricsPort(listen, lambda: reply)


def address_of(opened: MetricsPort) -> str:
    return opened.url.removeprefix("http://").removesuffix("/metrics")


def samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values, in order of the labels' names."""
    found = {(each.name, *(value for _, value in sorted(each.labels.items()))): each.value for f in families for each in f.samples}
    return {key: value for key, value in found.items() if not math.isnan(value)}


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"])
@on_shared_loop
async def test_a_parser_reads_what_the_snapshot_says(accept: str) -> None:
    async with port() as opened:
        answer = await get(address_of(opened), "/metrics", accept=accept)
    assert answer.status == 200
    is_open = answer.fields["content-type"].startswith("application/openmetrics-text")
    assert is_open is accept.startswith("application/openmetrics-text")
    families = list((openmetrics if is_open else text_string_to_metric_families)(answer.body))
    assert all(family.documentation and family.name.startswith("shardnet_") for family in families)
    found = samples(families)
    assert found["shardnet_up",] == 1
    assert found["shardnet_build", "worker", "1.2.3"] == 1
    assert (found["shardnet_rank",], found["shardnet_world_size",], found["shardnet_epoch",]) == (1, 4, 3)
    assert (found["shardnet_step",], found["shardnet_loss",]) == (120, 2.5)
    assert (found["shardnet_step_seconds_count",], found["shardnet_step_seconds_sum",]) == (4, 8.0)
    assert found["shardnet_exposed_communication_ratio",] == 0.25
    assert found["shardnet_exposed_communication_seconds_total",] == 2.25
    buckets = [found["shardnet_collective_seconds_bucket", le, "all_gather"] for le in (*map(str, BOUNDS_S), "+Inf")]
    assert buckets == [1, *[3] * 17, 6]
    assert found["shardnet_collective_seconds_sum", "all_gather"] == 1.5
    assert found["shardnet_collective_failures_total", "all_gather"] == 1
    assert found["shardnet_bytes_sent_total",] == 7
    assert found["shardnet_peer_wait_seconds_total", "2"] == 0.75
    ways = ("network", "memory")
    assert [found["shardnet_peer_bytes_sent_total", "0", way] for way in ways] == [1, 2]
    assert [found["shardnet_peer_bytes_received_total", "0", way] for way in ways] == [3, 4]
    assert (found["shardnet_stalls_total",], found["shardnet_stall_seconds_total",]) == (1, 3.5)
    assert (found["shardnet_lost_peers_total",], found["shardnet_peak_resident_memory_bytes",]) == (2, 400)
    assert [found["shardnet_device_memory_bytes", state] for state in ("allocated", "reserved", "peak")] == [5, 6, 7]
    assert ("shardnet_link_bytes_per_second",) not in found, "nobody has measured it"


@on_shared_loop
async def test_a_rendezvous_tells_of_its_jobs_and_of_no_training() -> None:
    async with port(RENDEZVOUS) as opened:
        found = samples(list(text_string_to_metric_families((await get(address_of(opened), "/metrics")).body)))
    assert (found["shardnet_job_running", "lm"], found["shardnet_job_workers", "lm"], found["shardnet_job_epoch", "lm"]) == (1, 3, 2)
    assert not any(name.startswith(("shardnet_step", "shardnet_collective", "shardnet_rank")) for name, *_ in found)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "GET", 404), ("/metrics/", "GET", 404), ("/metrics?x=1", "GET", 200), ("/metrics", "POST", 405), ("/metrics", "HEAD", 405)],
)
@on_shared_loop
async def test_there_is_one_page_and_one_way_to_ask_for_it(path: str, method: str, status: int) -> None:
    async with port() as opened:
        answer = await get(address_of(opened), path, method=method)
        assert answer.status == status
        assert answer.fields["connection"] == "close"
        assert ("allow" in answer.fields) is (status == 405)


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /metrics\r\n\r\n", b"\r\n\r\n", b"x" * 20_000]
)
@on_shared_loop
async def test_what_is_no_request(said: bytes) -> None:
    async with port() as opened:
        assert (await say(address_of(opened), said)).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@on_shared_loop
async def test_callers_that_say_nothing_hold_up_neither_each_other_nor_the_end() -> None:
    async with port() as opened:
        address = address_of(opened)
        silent = [await knock(address) for _ in range(3)]
        assert (await get(address, "/metrics")).status == 200
        await opened.aclose()
        for sock in silent:
            with sock:
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    await opened.aclose()


@on_shared_loop
async def test_a_snapshot_that_fails_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> stats_pb2.SnapshotReply:
        raise RuntimeError("a secret path")

    async with MetricsPort("127.0.0.1:0", fail) as opened:
        assert await say(address_of(opened), b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    assert "a secret path" in caplog.text
    caplog.clear()


@on_shared_loop
async def test_where_it_may_listen() -> None:
    with pytest.raises(PlaintextRefused, match=r"metrics at 0\.0\.0\.0:9464 would be open to everybody"):
        port(listen="0.0.0.0:9464")
    opened = MetricsPort("0.0.0.0:0", lambda: WORKER, insecure=True)
    assert opened.url == ""
    await opened.aclose()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"cannot listen on {taken}: another process"):
            await port(listen=taken).start()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shardnet.transport.metrics", None)
    with pytest.raises(UsageError, match=r"install shardnet\[metrics\], or leave them off"):
        port()
