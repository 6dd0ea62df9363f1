"""The links between machines: each doctor joins, as a worker does, and they measure each other, two by two.

[Note: two by two] While one pair measures, no other doctor uses its two machines: in each of n - 1 rounds (n if n is odd) every doctor
meets another one (the circle method of round-robin tournaments).
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.backend import Backend
from shardnet.config import Timeouts
from shardnet.credentials import DOCTOR
from shardnet.doctor.finding import Finding, ok, problem, warning
from shardnet.errors import CollectiveError, RendezvousError, ShardnetError
from shardnet.training import Cluster, connect

PINGS = 20
FIRST_BYTES, MOST_BYTES = 256 << 10, 16 << 20  # the sizes that are sent to measure a speed: four times as much each time,
ENOUGH_S = 0.2  # until sending takes this long,
TRIES = 3  # and then this many times
SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
CLOCKS_S = 1.0  # the largest difference between clocks: certificates, logs and timelines depend on them
_LABEL = "doctor"
# These win over the environment, whose values are for a training that may run at the same time with its own files and metrics port.
_OWN = {"elastic": False, "replacement": False, "wished_rank": -1, "report_file": "", "trace": "", "track": "", "flight": "", "metrics": ""}


@dataclass(frozen=True, slots=True)
class Link:
    """What one doctor has measured on the link to another one."""

    round_trip_s: float  # the median
    clock_s: float  # how far the other one's clock is ahead
    to_bytes_per_s: float
    from_bytes_per_s: float


async def about_peers(workers: int, *, job: str, wait_s: float, **settings: Any) -> list[Finding]:
    """Wait for the others, then measure.

    workers   how many doctors there are
    job       the job of their certificates; they meet in a separate job, and do not disturb this one
    wait_s    how long to wait for the others
    settings  of `connect`
    """
    sizes = {"min_world_size": workers, "max_world_size": workers}
    try:
        async with connect(job=job + DOCTOR, timeouts=Timeouts(join_s=wait_s), **sizes, **_OWN, **settings) as cluster:
            links = await _measure(cluster.backend)
            return [_finding(cluster, peer, link) for peer, link in sorted(links.items())]
    except (RendezvousError, CollectiveError) as error:
        return [problem("peers", str(error), "check that shardnet doctor has the same --rendezvous, --job and --workers on every machine")]
    except ShardnetError as error:
        return [problem("peers", str(error))]


async def _measure(backend: Backend) -> dict[int, Link]:
    links = {}
    for opponent in opponents(backend.rank, backend.world_size):
        await backend.barrier(label=_LABEL)
        if opponent is not None:
            links[opponent] = await _link(backend, opponent)
    await backend.barrier(label=_LABEL)
    return links


def opponents(rank: int, world_size: int) -> Iterator[int | None]:
    """The rank that `rank` meets, round by round; None when it rests. [Note: two by two]"""
    last = world_size - 1 + world_size % 2  # stays in its place, while the others rotate
    for turn in range(last):
        if rank == last:
            other = turn * (last + 1) // 2 % last
        else:
            other = (turn - rank) % last
            other = last if other == rank else other
        yield other if other < world_size else None


async def _link(backend: Backend, peer: int) -> Link:
    """One rank asks and sends while the other answers and receives; the lower rank begins."""
    if backend.rank < peer:
        round_trip_s, clock_s = await _ping(backend, peer)
        to_bytes_per_s = await _send(backend, peer)
        await _answer(backend, peer)
        return Link(round_trip_s, clock_s, to_bytes_per_s, await _receive(backend, peer))
    await _answer(backend, peer)
    from_bytes_per_s = await _receive(backend, peer)
    round_trip_s, clock_s = await _ping(backend, peer)
    return Link(round_trip_s, clock_s, await _send(backend, peer), from_bytes_per_s)


async def _ping(backend: Backend, peer: int) -> tuple[float, float]:
    """The median round trip, and by how much the other clock is ahead, taken from the fastest round trip; in seconds."""
    trips = []
    for _ in range(PINGS):
        theirs = torch.zeros(1, dtype=torch.float64, device="cpu")
        start, start_s = time.perf_counter(), time.time()
        await backend.send(theirs, peer, label=_LABEL)
        await backend.recv(theirs, peer, label=_LABEL)
        took_s = time.perf_counter() - start
        trips.append((took_s, theirs.item() - start_s - took_s / 2))
    return statistics.median(took_s for took_s, _ in trips), min(trips)[1]


async def _answer(backend: Backend, peer: int) -> None:
    for _ in range(PINGS):
        await backend.recv(torch.zeros(1, dtype=torch.float64, device="cpu"), peer, label=_LABEL)
        await backend.send(torch.tensor([time.time()], dtype=torch.float64, device="cpu"), peer, label=_LABEL)


async def _send(backend: Backend, peer: int) -> float:
    """Bytes per second of the fastest piece, timed until the other rank has confirmed it."""
    size, fastest, tries = FIRST_BYTES, 0.0, 0
    while tries < TRIES:
        piece = torch.zeros(size, dtype=torch.uint8, device="cpu")
        await backend.send(torch.tensor([size], device="cpu"), peer, label=_LABEL)
        start = time.perf_counter()
        await backend.send(piece, peer, label=_LABEL)
        await backend.recv(torch.zeros(1, device="cpu"), peer, label=_LABEL)
        took_s = time.perf_counter() - start
        fastest = max(fastest, size / took_s)
        if took_s > ENOUGH_S or size == MOST_BYTES:
            tries += 1
        else:
            size *= 4
    await backend.send(torch.tensor([0], device="cpu"), peer, label=_LABEL)
    await backend.send(torch.tensor([fastest], dtype=torch.float64, device="cpu"), peer, label=_LABEL)
    return fastest


async def _receive(backend: Backend, peer: int) -> float:
    """The same, as the sender has measured it."""
    while True:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        await backend.recv(size, peer, label=_LABEL)
        if not size.item():
            break
        await backend.recv(torch.empty(int(size.item()), dtype=torch.uint8, device="cpu"), peer, label=_LABEL)
        await backend.send(torch.zeros(1, device="cpu"), peer, label=_LABEL)
    speed = torch.zeros(1, dtype=torch.float64, device="cpu")
    await backend.recv(speed, peer, label=_LABEL)
    return speed.item()


def _finding(cluster: Cluster, peer: int, link: Link) -> Finding:
    member = cluster.topology.members[peer]
    near = member.node_group == cluster.topology.me.node_group
    place = f"rank {peer} ({member.address}, {'this machine' if near else member.node})"
    return judge(place, link, near=near, shares_memory=peer in cluster.telemetry.memory_peers)


def judge(place: str, link: Link, *, near: bool, shares_memory: bool) -> Finding:
    """`near`: it is on this machine."""
    what = (
        f"{place}: {'memory' if shares_memory else 'gRPC'}, round trip {1e3 * link.round_trip_s:.2f} ms, "
        f"{_speed(link.to_bytes_per_s)} there, {_speed(link.from_bytes_per_s)} back, its clock {1e3 * link.clock_s:+.0f} ms"
    )
    if abs(link.clock_s) > CLOCKS_S:
        return warning("peers", what, "set both clocks by NTP: certificates, logs and timelines depend on them")
    if near and not shares_memory:
        return warning(
            "peers", what, "two processes of one machine do not share memory: are they in containers that cannot see each other?"
        )
    if min(link.to_bytes_per_s, link.from_bytes_per_s) < SLOW_BYTES_PER_S:
        return warning("peers", what, "less than 100 Mbit/s: `shardnet plan` tells what this costs per step, and `Compression` sends less")
    return ok("peers", what)


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"
