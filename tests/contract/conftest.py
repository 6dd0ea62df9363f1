"""One suite for every backend: each test here runs in one process and over gRPC, within a node and across nodes.

    one process   over gRPC
    loopback      shm          all ranks on one node: direct collectives; `shm` sends data through shared memory
    ring          grpc         each rank a node of its own: around the ring
                  nodes        two ranks per node: hierarchical, through shared memory and over gRPC
    staged                     like loopback, but tensors are copied elsewhere and back, as a GPU's are
    gloo                       all ranks on one node: large data by a torch process group
    hybrid                     two ranks per node: gloo inside nodes, the ring across them

Ranks of one node (`shm`) tell each other by letters where large data lies. `streams` and `windows` (ENGINES) are for tests of the
results: `streams` has no mailbox, and `windows` cannot read other ranks' memory either.

Tests share `world`, because forming a mesh costs more than most of them; they must leave it as they found it. A test that
breaks something takes `fresh`. Limits are tiny, so that a few hundred bytes make many chunks and wrap around a window.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, LoopbackBackend
from shardnet.backend.hybrid_backend import HybridBackend
from shardnet.backend.staging import Staging
from shardnet.backend.streams import Copy, CopyStreams, Event
from shardnet.backend.torch_backend import TorchBackend
from shardnet.collectives.group import Group
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.loop import LoopThread
from shardnet.testing import local_cluster, loopback_cluster
from tests.backend.torch_ranks import torch_cluster
from tests.devices import TEST_DEVICE

KINDS = ("loopback", "shm", "ring", "grpc", "nodes", "staged", "gloo", "hybrid")
# for most tests: what they check of a ring over gRPC they need not check in one process as well
COMMON = ("loopback", "shm", "grpc", "staged", "gloo")
RANKS_PER_NODE = {"ring": 1, "grpc": 1, "nodes": 2, "hybrid": 2}
# In elements of float32: a chunk has 16, 8 go eagerly to each peer, data from 4 on goes through memory, and a window holds 128.
LIMITS = Limits(chunk_bytes=64, eager_bytes=32, window_bytes=512, inline_bytes=16)
TIMEOUTS = Timeouts.for_tests()

ENGINES: dict[str, dict[str, Any]] = {
    "streams": {"limits": replace(LIMITS, letter_bytes=0)},  # loans that are announced over streams
    "windows": {"limits": replace(LIMITS, letter_bytes=0), "lending": False},
}

TORCH = {"gloo": TorchBackend, "hybrid": HybridBackend}

MakeCluster = Callable[..., AbstractAsyncContextManager[Sequence[Backend]]]


class LateCopy(Copy):
    """A copy that is made only when somebody waits for it."""

    is_done = property(lambda self: False)

    def wait(self) -> None:
        self.target.copy_(self.source)


class LateStreams(CopyStreams):
    """Copies within the CPU's memory that seem to take as long as a GPU's: none is done before somebody waits for it."""

    def fetch(self, source: torch.Tensor, after: Event) -> Copy:
        return LateCopy(source, self.host_like(source), after, after)


class StagedRank(LoopbackBackend):
    """A rank that treats all memory as a GPU's."""

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts) -> None:
        super().__init__(board, group, timeouts)
        self._staging = Staging(board, self._is_on_gpu, LateStreams)

    @staticmethod
    def _is_on_gpu(_: torch.Tensor) -> bool:
        return True


@asynccontextmanager
async def staged_cluster(world_size: int, **options: Any) -> AsyncIterator[Sequence[Backend]]:
    async with AsyncExitStack() as stack:
        ranks = StagedRank.create_group(world_size, **options)
        for rank in ranks:
            stack.push_async_callback(rank.aclose)
        yield ranks


def cluster(kind: str, world_size: int, *, limits: Limits = LIMITS, **options: Any) -> AbstractAsyncContextManager[Sequence[Backend]]:
    make: MakeCluster = partial(torch_cluster, TORCH[kind]) if kind in TORCH else MAKERS.get(kind, loopback_cluster)
    own = {"timeouts": TIMEOUTS, "ranks_per_node": RANKS_PER_NODE.get(kind), "limits": limits, **ENGINES.get(kind, {})}
    return make(world_size, **{**own, **options})


MAKERS: dict[str, MakeCluster] = {
    **dict.fromkeys(ENGINES, local_cluster),
    "shm": local_cluster,
    "grpc": local_cluster,
    "nodes": local_cluster,
    "staged": staged_cluster,
}
SIZES = {"loopback": (1, 2, 3, 4, 5), "grpc": (1, 2, 3, 4), "nodes": (3, 4), "staged": (1, 3), "gloo": (3,), "hybrid": (4, 5)}
WORLDS = [(kind, size) for kind in KINDS for size in SIZES.get(kind, (2, 3, 4))]


def name_of(value: object) -> str:
    """The name of a parameter in its test's name."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="session", params=WORLDS, ids=name_of)
def world(request: pytest.FixtureRequest) -> Iterator[Sequence[Backend]]:
    """The backends of 1 to 5 ranks, by rank."""
    yield from shared_cluster(*request.param)


@pytest.fixture(scope="session", params=COMMON)
def pair(request: pytest.FixtureRequest) -> Iterator[Sequence[Backend]]:
    """Two ranks."""
    yield from shared_cluster(request.param, 2)


@pytest.fixture(scope="session", params=("loopback", "grpc", "nodes", "gloo", "hybrid"))
def four(request: pytest.FixtureRequest) -> Iterator[Sequence[Backend]]:
    """Four ranks."""
    yield from shared_cluster(request.param, 4)


@pytest.fixture(params=COMMON)
def fresh(request: pytest.FixtureRequest) -> MakeCluster:
    """Makes a cluster of its own for a test: `async with fresh(3, timeouts=...) as ranks`."""
    return lambda world_size, **options: cluster(request.param, world_size, **options)


def shared_cluster(kind: str, world_size: int) -> Iterator[Sequence[Backend]]:
    """A cluster that outlives a test's event loop: it is opened and closed on shardnet's own."""
    loop, stack = LoopThread.shared(), AsyncExitStack()
    ranks = loop.run(stack.enter_async_context(cluster(kind, world_size))).result(TIMEOUTS.connect_s)
    for started in [
        rank.all_reduce(torch.ones(400, device=TEST_DEVICE)) for rank in ranks
    ]:  # so that whatever the first use makes is there before tests begin
        started.wait(TIMEOUTS.collective_s)
    yield ranks
    loop.run(stack.aclose()).result(TIMEOUTS.collective_s)
