"""Running one function on every rank of a loopback group, each in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from shardnet.backend import Backend, LoopbackBackend
from shardnet.config import Limits, Timeouts
from tests.devices import by_default

T = TypeVar("T")


def run_ranks(world_size: int, work: Callable[[Backend], T], *, limits: Limits | None = None, ranks_per_node: int | None = None) -> list[T]:
    """`work(backend)` on every rank at once; the results by rank. The first error ends all ranks and is raised."""
    backends = LoopbackBackend.create_group(world_size, ranks_per_node=ranks_per_node, timeouts=Timeouts.for_tests(), limits=limits)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(backend: Backend) -> None:
        try:
            # both settings are per thread; a GPU's backwards would run on one of torch's threads for all ranks, which wait for each other
            with by_default(), torch.autograd.set_multithreading_enabled(False):
                results[backend.rank] = work(backend)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)
            for other in backends:
                other.abort()

    threads = [threading.Thread(target=run, args=(backend,), name=f"rank {backend.rank}") for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(_close(backends))
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


async def _close(backends: list[LoopbackBackend]) -> None:
    await asyncio.gather(*(backend.aclose() for backend in backends))
