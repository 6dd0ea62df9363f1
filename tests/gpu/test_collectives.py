"""Collectives of tensors on a GPU, between processes: through pinned memory, in the order of streams."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardnet
from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.backend.streams import now
from shardnet.errors import CollectiveMismatch
from shardnet.telemetry import TransferDirection
from shardnet.testing import ClusterRunner, RanksFailed, same_bits
from tests.devices import needs_gpu

pytestmark = [needs_gpu, pytest.mark.timeout(120)]

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
ROWS = (4, 60_000)  # on the CPU, the first goes as a letter (one eager message), the second in chunks
A_WHILE = 200_000_000  # cycles of the GPU: about a tenth of a second


def calls(rank: Backend) -> dict[str, Callable[[torch.Tensor], Pending[Any]]]:
    """Each collective, of a tensor [rows]."""
    n, me = rank.world_size, rank.rank
    return {
        "all_reduce": lambda x: rank.all_reduce(x, ReduceOp.MAX),
        "in place": lambda x: rank.all_reduce(x, ReduceOp.MAX, out=x),
        "broadcast": lambda x: rank.broadcast(x, 1),
        "all_gather": rank.all_gather,
        "uneven gather": lambda x: rank.all_gather(x[: me + 1], sizes=range(1, n + 1)),
        "on the node": lambda x: rank.all_gather_on_node(x).map(lambda buffer: buffer.tensor),
        "reduce_scatter": lambda x: rank.reduce_scatter(x, ReduceOp.MIN),
        "all_to_all": rank.all_to_all,
        "uneven exchange": lambda x: rank.all_to_all(x[: n * (me + 1)], send_sizes=[me + 1] * n, recv_sizes=range(1, n + 1)),
        "receive": lambda x: _around(rank, x),
    }


def _around(rank: Backend, x: torch.Tensor) -> Pending[torch.Tensor]:
    rank.send(x, (rank.rank + 1) % rank.world_size).quietly()
    return rank.recv(torch.empty_like(x), (rank.rank - 1) % rank.world_size)


async def compare(cluster: shardnet.Cluster) -> list[str]:
    """The collectives whose results differ from those on the CPU."""
    different = []
    for dtype in DTYPES:
        for rows in ROWS:
            x = (torch.arange(rows) % 7 * (cluster.rank + 1) % 5).to(dtype)
            for name, call in calls(cluster.backend).items():
                on_gpu, on_cpu = call(x.cuda()), call(x.clone())
                result = await on_gpu
                if not (result.is_cuda and same_bits(result, await on_cpu)):
                    different.append(f"{name} of {dtype} [{rows}]")
    return different


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_gpu_gets_what_a_cpu_gets(cluster: ClusterRunner, nodes: int) -> None:
    assert cluster.run(compare, 2, processes=True, nodes=nodes, timeout_s=90) == [[], []]


async def reduce_what_is_computed_later(cluster: shardnet.Cluster) -> tuple[bool, bool, bool]:
    """Whether the call returned before the GPU was done, whether its input is unchanged, and whether the sum has what was then written."""
    for _ in range(2):  # the first time each kernel is loaded and memory is pinned, which waits for the GPU
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(10 * A_WHILE)  # type: ignore[no-untyped-call]  # keeps the GPU busy for longer than a call takes on a busy host
        before = now(x.device)
        x += cluster.rank + 1  # after the long computation
        started = cluster.backend.all_reduce(x)
        returned_early = not before.query()
        y = await started
        doubled = y * 2  # computes with the result: the stream has been told to wait for it, but this thread does not wait
        kept, right = bool((x == cluster.rank + 1).all()), bool((doubled == 6).all())
    return returned_early, kept, right


def test_a_collective_follows_its_stream_and_waits_for_nothing(cluster: ClusterRunner) -> None:
    assert cluster.run(reduce_what_is_computed_later, 2, processes=True) == [(True, True, True)] * 2


async def gather_ahead(cluster: shardnet.Cluster) -> tuple[bool, bool]:
    """Whether a gather ended before the computing stream had reached it, and whether its result is right."""
    shard = torch.full((1 << 20,), float(cluster.rank), device="cuda")
    await cluster.backend.all_gather(shard)  # the first one waits for the GPU: its pinned memory is allocated
    torch.cuda.synchronize()
    ready = now(shard.device)
    torch.cuda._sleep(20 * A_WHILE)  # type: ignore[no-untyped-call]
    computing = now(shard.device)
    pending = cluster.backend.all_gather(shard, after=ready)
    whole = await pending
    ended_early = not computing.query()
    return ended_early, bool((whole.view(2, -1)[1] == 1).all())


def test_a_gather_of_what_was_ready_before_does_not_wait_for_the_computing_stream(cluster: ClusterRunner) -> None:
    assert cluster.run(gather_ahead, 2, processes=True) == [(True, True)] * 2


async def free_what_is_under_way(cluster: shardnet.Cluster) -> float:
    """The smallest received value if input memory is dropped as soon as the call has returned."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    least = float("inf")
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(A_WHILE // 50)  # type: ignore[no-untyped-call]
            given = torch.ones(1 << 18, device="cuda")
        with torch.cuda.stream(side):
            pending = cluster.backend.all_reduce(given)
        del given
        spoilt = torch.zeros(1 << 18, device="cuda")  # takes the place of the input, if the allocator has freed that
        result = await pending
        least = min(least, result.min().item())
        del spoilt
    return least


def test_memory_stays_until_it_has_been_read(cluster: ClusterRunner) -> None:
    assert cluster.run(free_what_is_under_way, 2, processes=True) == [2.0, 2.0]


async def differ_in_device(cluster: shardnet.Cluster) -> None:
    await cluster.backend.all_reduce(torch.ones(4, device="cuda" if cluster.rank else "cpu"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_on_a_gpu_and_one_on_the_cpu_is_a_mismatch(cluster: ClusterRunner, nodes: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        cluster.run(differ_in_device, 2, processes=True, nodes=nodes)
    for rank in range(2):
        failure = caught.value.of_rank(rank)
        assert failure.kind == CollectiveMismatch.__name__
        assert "all_reduce(float32 [4], sum on a GPU)" in failure.message
        assert "all_reduce(float32 [4], sum)" in failure.message


class Copies:
    """An observer of a rank that waits for a number of copies."""

    def __init__(self, number: int) -> None:
        self.counted = asyncio.Event()
        self._missing = number
        self._loop = asyncio.get_running_loop()

    def on_transfer(self, direction: TransferDirection, duration_ns: int, bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.counted.set()

    def _nothing(self, *_: object) -> None: ...

    on_step = on_pass = on_collective = _nothing


async def count_copies(cluster: shardnet.Cluster) -> dict[str, int]:
    """What a recorder says about the copies of two gathers: each copies 4 MiB to the CPU, and twice as much back."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    recorder = await cluster.record(None, optimizer)
    copies = Copies(2 * 2)
    cluster.telemetry.observe(copies)  # added after the recorder, which therefore counts each copy first
    for _ in range(2):
        await cluster.backend.all_gather(torch.ones(1 << 20, device="cuda"))
    await copies.counted.wait()
    memory = recorder.zero3.memory_transfer_metrics
    return {"to the GPU": memory.cpu_to_gpu_bytes, "from it": memory.gpu_to_cpu_bytes, "ns": recorder.zero3.parameter_transfer_time}


def test_copies_are_counted(cluster: ClusterRunner) -> None:
    for counted in cluster.run(count_copies, 2, processes=True):
        assert counted["from it"] == 2 * (4 << 20)
        assert counted["to the GPU"] == 2 * (8 << 20)
        assert counted["ns"] > 0
