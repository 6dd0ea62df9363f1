"""Doing the same on every rank of a cluster that lives in one process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from shardnet.backend.base import Backend
from shardnet.errors import ShardnetError

T = TypeVar("T")
Work = Callable[[Backend], Awaitable[T]]


async def each_rank(backends: Sequence[Backend], work: Work[T]) -> list[T]:
    """Run `work(backend)` for every rank at once; returns the results by rank. Waits for all, then raises the first error, if any."""
    results: dict[int, T] = {}

    async def run(index: int) -> None:
        results[index] = await work(backends[index])

    for outcome in await asyncio.gather(*map(run, range(len(backends))), return_exceptions=True):
        if outcome is not None:
            raise outcome
    return [results[index] for index in range(len(backends))]


async def each_error(backends: Sequence[Backend], work: Work[object]) -> list[ShardnetError]:
    """Run `work(backend)`, which must fail on every rank; returns the errors by rank. Raises AssertionError for a rank that succeeds."""

    async def fail(backend: Backend) -> ShardnetError:
        try:
            result = await work(backend)
        except ShardnetError as error:
            return error
        raise AssertionError(f"rank {backend.rank} did not fail but gave {result!r}")

    return await each_rank(backends, fail)
