"""What a backend over NCCL does on a GPU, as far as one GPU shows it: a process group of one rank, streams, events and sums.

A group of one rank needs no engine, so these tests call the code after the check for that.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import shardnet
from shardnet.backend import Pending, ReduceOp
from shardnet.backend.hybrid_backend import HybridBackend
from shardnet.backend.torch_backend import TorchBackend
from shardnet.backend.torch_source import TorchSource
from shardnet.backend.torch_sums import combined, finish
from shardnet.collectives.reduction import Reduction
from shardnet.config import NodeEngine
from shardnet.testing import loopback_cluster, same_bits
from tests.devices import needs_gpu

pytestmark = needs_gpu

Tensor = torch.Tensor
ELEMENTS = 1_000_003
BUSY_CYCLES = 1_000_000_000  # half a second of a GPU's time: far longer than a call takes on the host
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.fixture
async def alone() -> AsyncIterator[TorchBackend]:
    """One rank, with NCCL."""
    store = HashStore()
    async with loopback_cluster(1) as (rank,):
        backend = TorchBackend(rank._board, rank._group, rank._timeouts, TorchSource(NodeEngine.NCCL, lambda: store))
        await all_reduce(backend, torch.ones(1, device="cuda"))  # makes the communicator
        yield backend


def all_reduce(backend: TorchBackend, x: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
    return backend._all_reduce(backend._call("all_reduce", "", None, ""), x, torch.empty_like(x), op)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLES], ids=str)
def test_sums_have_the_bits_that_they_have_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        parts = [torch.randn(999, generator=generator).to(dtype) for _ in range(5)]
    else:
        parts = [torch.randint(0, 2 if dtype is torch.bool else 100, (999,), generator=generator).to(dtype) for _ in range(5)]
    for op in ReduceOp:
        if op.is_defined_for(dtype):
            reduction, results = Reduction(op, dtype, 5), []
            for device in ("cpu", "cuda"):
                out = torch.empty(999, dtype=dtype, device=device)
                finish(reduction, combined(reduction, [part.to(device) for part in parts]), out)
                results.append(out.cpu())
            assert same_bits(*results), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
async def test_every_collective_goes_through_nccl(alone: TorchBackend, dtype: torch.dtype) -> None:
    x = (torch.arange(ELEMENTS, device="cuda") % (2 if dtype is torch.bool else 100)).to(dtype)
    whole = [(0, ELEMENTS)]

    def call(op: str) -> Any:
        return alone._call(op, "", None, "")

    calls: dict[str, Callable[[Tensor], Pending[Tensor]]] = {
        "all_reduce": lambda out: alone._all_reduce(call("all_reduce"), x, out, ReduceOp.SUM),
        "all_gather": lambda out: alone._all_gather(call("all_gather"), x, out, whole, None),
        "reduce_scatter": lambda out: alone._reduce_scatter(call("reduce_scatter"), x, out, whole, ReduceOp.MAX),
        "broadcast": lambda out: alone._broadcast(call("broadcast"), out.copy_(x), 0),
        "all_to_all": lambda out: alone._all_to_all(call("all_to_all"), x, out, whole, whole, even=False),
    }
    for start in calls.values():
        out = torch.zeros_like(x)
        assert (await start(out)).data_ptr() == out.data_ptr()
        assert same_bits(out.cpu(), x.cpu())


async def test_a_result_is_there_in_the_order_of_streams_and_no_thread_waits(alone: TorchBackend) -> None:
    x = torch.zeros(ELEMENTS, device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    x.fill_(3.0)  # after the GPU's present work
    handle = all_reduce(alone, x)
    result = handle.wait()
    assert not torch.cuda.current_stream().query(), "the host has waited"
    doubled = result * 2  # after the sum, on the same stream
    del x, result
    assert (doubled == 6).all().item()


async def test_what_waits_on_another_stream_has_the_result(alone: TorchBackend) -> None:
    x = torch.full((ELEMENTS,), 2.0, device="cuda")
    handle = all_reduce(alone, x, ReduceOp.PRODUCT)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        assert (await handle == 2).all().item()


async def test_memory_that_is_dropped_at_once_is_used_again_only_behind_it(alone: TorchBackend) -> None:
    """The caller keeps neither inputs nor results of many collectives, only their handles."""
    handles = [all_reduce(alone, torch.full((ELEMENTS,), float(number), device="cuda")) for number in range(50)]
    for number, handle in enumerate(handles):
        assert (await handle == number).all().item()


async def test_tensors_on_the_cpu_are_taken_as_well(alone: TorchBackend) -> None:
    assert (await alone.all_reduce(torch.ones(3))).tolist() == [1, 1, 1]


async def test_connected_with_nccl() -> None:
    """A world of one, as a program on one GPU has it."""
    async with shardnet.connect(node_engine="nccl") as cluster:
        assert isinstance(cluster.backend, HybridBackend)
        x = torch.arange(10.0, device="cuda")
        out = torch.zeros(10, device="cuda")
        assert (await cluster.backend.all_reduce(x, ReduceOp.MEAN, out=out)).data_ptr() == out.data_ptr()
        assert out.tolist() == x.tolist()
        for op in ("all_gather", "reduce_scatter", "all_to_all"):
            assert (await getattr(cluster.backend, op)(x)).tolist() == x.tolist()
        assert (await cluster.backend.broadcast(x, 0)).device == x.device
