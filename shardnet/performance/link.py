"""Measuring how fast this rank can send while all ranks do."""

import asyncio
import time

import torch

from shardnet.backend import Backend

PROBE_BYTES = 8 << 20
REPEATS = 4  # the first one warms up buffers and connections
_LABEL = "link probe"
_RECEIPT = "receipt"


async def measure_link(backend: Backend, *, probe_bytes: int = PROBE_BYTES) -> float | None:
    """Bytes per second from this rank to the next one, with every rank sending at once as collectives do; None in a world of one.

    A collective, for the start of a run. It takes the fastest of a few tries, which shows what the link can do.
    """
    if backend.world_size == 1:
        return None
    outgoing = torch.zeros(probe_bytes, dtype=torch.uint8, device="cpu")
    incoming = torch.empty_like(outgoing)
    following, previous = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size

    async def give() -> float:
        """The time until the next rank has the probe, as it says: `send` returns while data is still in buffers on the way."""
        start = time.perf_counter()
        await backend.send(outgoing, following, label=_LABEL)
        await backend.recv(torch.empty(1, device="cpu"), following, tag=_RECEIPT, label=_LABEL)
        return time.perf_counter() - start

    async def take() -> None:
        await backend.recv(incoming, previous, label=_LABEL)
        await backend.send(torch.zeros(1, device="cpu"), previous, tag=_RECEIPT, label=_LABEL)

    fastest_s = float("inf")
    for _ in range(REPEATS):
        await backend.barrier(label=_LABEL)
        took_s, _ = await asyncio.gather(give(), take())
        fastest_s = min(fastest_s, took_s)
    return probe_bytes / fastest_s
