"""`summing`: ranks of this process that keep working while something else happens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import torch

from shardnet.backend import Backend


@asynccontextmanager
async def summing(ranks: Sequence[Backend]) -> AsyncIterator[None]:
    """Run one collective after another meanwhile, and check the results."""
    over = asyncio.Event()

    async def run() -> None:
        for number in count():
            sums = await asyncio.gather(*(rank.all_reduce(torch.full((1000,), float(number))) for rank in ranks))
            assert all(torch.equal(each, torch.full((1000,), 2.0 * number)) for each in sums)
            if over.is_set():
                return

    running = asyncio.ensure_future(run())
    try:
        yield
    finally:
        over.set()
        await running
