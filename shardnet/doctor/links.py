"""How fast the links between machines are: the doctors measure each other, two by two.

[Note: two by two] While one pair measures, no other doctor uses its two machines: in each of n - 1 rounds (n if n is odd) every doctor
meets another one (the circle method of round-robin tournaments).
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardnet.backend import Backend
from shardnet.doctor.finding import Finding, ok, warning
from shardnet.doctor.ports import place
from shardnet.topology import Topology

PINGS = 20
FIRST_BYTES, MOST_BYTES = 256 << 10, 16 << 20  # the sizes that are sent to measure a speed: four times as much each time,
ENOUGH_S = 0.2  # until sending takes this long,
TRIES = 3  # and then this many times
SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
CLOCKS_S = 1.0  # the largest difference between clocks: certificates, logs and timelines depend on them
_LABEL = "doctor"


@dataclass(frozen=True, slots=True)
class Link:
    """What one doctor has measured on the link to another one."""

    round_trip_s: float  # the median
    clock_s: float  # how far the other one's clock is ahead
    to_bytes_per_s: float
    from_bytes_per_s: float


async def measure(backend: Backend, topology: Topology, found: dict[int, Finding]) -> None:
    """Add to `found`, by rank, what is found of each link. If this raises, the links that were measured before are there."""
    for opponent in opponents(backend.rank, backend.world_size):
        await backend.barrier(label=_LABEL)
        if opponent is not None:
            link, member = await _link(backend, opponent), topology.members[opponent]
            near = member.node_group == topology.me.node_group
            shares_memory = opponent in backend.telemetry.memory_peers
            found[opponent] = judge(place(member, topology), link, near=near, shares_memory=shares_memory)
    await backend.barrier(label=_LABEL)


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
