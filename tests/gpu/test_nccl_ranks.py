"""NCCL between ranks: every collective, bits, streams, training, and what happens when a rank is lost. See nccl_ranks.py."""

import contextlib
import hashlib
import time
from typing import Any

import pytest
import torch

import shardnet
from shardnet import elastic
from shardnet.backend import ReduceOp
from shardnet.backend.hybrid_backend import with_engine
from shardnet.backend.line import Place
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.backend.streams import now
from shardnet.config import NodeEngine
from shardnet.errors import CollectiveError, CollectiveTimeout, PeerLost
from shardnet.loop import LoopThread
from shardnet.testing import ClusterRunner, Faults, bits, same_bits
from tests.contract.test_matrix import cases
from tests.devices import needs_gpu
from tests.gpu import test_fsdp
from tests.gpu.nccl_ranks import hybrid, over_nccl

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

WORLDS = [(2, 1), (3, 1), (4, 2), (3, 3)]  # ranks and nodes
BUSY_CYCLES = 1_000_000_000  # half a second of a GPU's time
ELEMENTS = 100_003
LOST_WITHIN_S = 5.0  # far below the time of a collective


async def try_all(cluster: shardnet.Cluster, dtype: str) -> list[str]:
    """The collectives whose results differ from plain torch. All are under way at once."""
    backend = (await over_nccl(cluster)).backend
    wanted = cases(getattr(torch, dtype), cluster.world_size)
    handles = [(case, case.start(backend, case.inputs[cluster.rank].cuda())) for case in wanted]
    wrong = []
    for case, handle in handles:
        got = await handle
        if not (got.is_cuda and same_bits(got.cpu(), case.expected[cluster.rank])):
            wrong.append(f"{case}: {got}")
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize(("world_size", "nodes"), WORLDS)
def test_every_collective(cluster: ClusterRunner, world_size: int, nodes: int, dtype: str) -> None:
    assert cluster.run(try_all, world_size, args=(dtype,), processes=True, nodes=nodes, timeout_s=60) == [[]] * world_size


async def sums(backend: Any, dtype: torch.dtype, device: str) -> str:
    """The bits of random sums."""
    generator = torch.Generator().manual_seed(backend.rank)
    x = torch.randn(backend.world_size * ELEMENTS, generator=generator).to(dtype).to(device)
    results = [backend.all_reduce(x, ReduceOp.MEAN), backend.reduce_scatter(x), backend.all_reduce(x, ReduceOp.MAX)]
    return hashlib.sha256(b"".join([bits((await result).cpu()) for result in results])).hexdigest()


async def compare_bits(cluster: shardnet.Cluster, dtype: str) -> list[str]:
    """Compare sums by NCCL on the GPU, twice, and by gloo on the CPU; within one node also by the mesh."""
    ours = await over_nccl(cluster)
    assert isinstance(cluster.backend, MeshBackend)
    by_gloo = await with_engine(cluster.backend.subgroup(range(cluster.world_size)), NodeEngine.GLOO, 0)
    runs = [(ours.backend, "cuda"), (ours.backend, "cuda"), (by_gloo, "cpu")]
    if len(cluster.backend.node_ranks) == 1:
        runs.append((cluster.backend, "cpu"))
    return [await sums(backend, getattr(torch, dtype), device) for backend, device in runs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world_size", "nodes"), [(3, 1), (4, 2)])
def test_sums_have_the_same_bits_by_any_engine(cluster: ClusterRunner, world_size: int, nodes: int, dtype: str) -> None:
    for seen in cluster.run(compare_bits, world_size, args=(dtype,), processes=True, nodes=nodes, timeout_s=120):
        assert len(set(seen)) == 1


async def reduce_what_is_computed_later(cluster: shardnet.Cluster) -> tuple[bool, bool, bool]:
    """Whether the call and the wait returned before the GPU was done, and whether the sum is that of what was written by then."""
    backend = (await over_nccl(cluster)).backend
    for _ in range(2):  # the first time makes the communicator
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        busy = now(x.device)
        x += cluster.rank + 1  # after the long computation
        handle = backend.all_reduce(x)
        called_early = not busy.query()
        y = await handle
        waited_early = not busy.query()
        del x
        right = bool((y * 2 == 6).all())
    return called_early, waited_early, right


def test_nothing_waits_for_the_gpu(cluster: ClusterRunner) -> None:
    assert cluster.run(reduce_what_is_computed_later, 2, processes=True) == [(True, True, True)] * 2


async def train(cluster: shardnet.Cluster, name: str) -> float:
    return await test_fsdp.train(await over_nccl(cluster), name)


@pytest.mark.parametrize("name", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "reshard to 2", "offload"])
def test_training_equals_one_process(cluster: ClusterRunner, name: str) -> None:
    for world_size, nodes in [(4, 2)] if "hybrid" in name or "reshard" in name else [(2, 1), (4, 2)]:
        differences = cluster.run(train, world_size, args=(name,), processes=True, nodes=nodes, timeout_s=120)
        assert max(differences) < 2e-5, (world_size, nodes)


async def measure_memory(cluster: shardnet.Cluster) -> dict[str, list[int]]:
    return await test_fsdp.measure_memory(await over_nccl(cluster), cpu_offload=False)


def test_memory_is_the_same_after_each_step(cluster: ClusterRunner) -> None:
    for measured in cluster.run(measure_memory, 2, processes=True, timeout_s=120):
        assert len(set(measured["after"][2:])) == 1
        assert len(set(measured["held"][2:])) == 1


async def hold_up(cluster: shardnet.Cluster) -> Place:
    """Take a place in this rank's line and keep it: only the other ranks launch operations after it, and they wait on the GPU."""

    async def take() -> Place:
        return hybrid(cluster)._whole.line.place()

    return await LoopThread.shared().run_here(take())


async def go_on_without(cluster: shardnet.Cluster) -> tuple[float, bool]:
    """Rank 1 is killed while the others are in a kernel with it. Return how long it takes until they hear of it, and whether they go on."""
    ours = await over_nccl(cluster)
    x = torch.ones(ELEMENTS, device="cuda")
    await ours.backend.all_gather(x)
    if cluster.rank == 1:
        await hold_up(ours)
    handle = ours.backend.all_gather(x)
    if cluster.rank == 1:
        with pytest.raises(TimeoutError):
            handle.wait(0.5)
        cluster.report(step=1)  # here rank 1 ends
    with contextlib.suppress(PeerLost):  # if the loss is heard of before the launch
        (await handle).sum().item()  # waits on the GPU, where the kernel would never end by itself
    start = time.monotonic()
    with pytest.raises(PeerLost):
        await ours.backend.all_gather(x)
    lost_after_s = time.monotonic() - start
    rest = ours.backend.subgroup([0, 2])
    total = await rest.all_reduce(x)
    torch.cuda.synchronize()
    return lost_after_s, bool((total == 2).all())


def test_who_waits_on_the_gpu_for_one_that_is_killed_goes_on(cluster: ClusterRunner) -> None:
    faults = Faults().kill(rank=1, at_step=1)
    first, killed, last = cluster.run(go_on_without, 3, processes=True, faults=faults, timeout_s=120)
    assert killed is None
    for lost_after_s, right in (first, last):
        assert lost_after_s < LOST_WITHIN_S
        assert right


async def go_on_after_a_timeout(cluster: shardnet.Cluster) -> bool:
    """A kernel that waits for a rank which never comes ends when that rank's collective times out, and another group goes on."""
    ours = await over_nccl(cluster)
    x = torch.ones(ELEMENTS, device="cuda")
    await ours.backend.all_gather(x)
    if cluster.rank == 1:
        await hold_up(ours)
    if cluster.rank == 1:
        with pytest.raises(CollectiveTimeout):
            await ours.backend.all_gather(x, timeout_s=1.0)
    else:
        await ours.backend.all_gather(x)  # the handle is done, but the kernel still waits on the GPU
        torch.cuda.synchronize()
    with pytest.raises(CollectiveError, match="has no torch process group any more, because"):
        await ours.backend.all_gather(x)
    total = await ours.backend.subgroup(range(2)).all_reduce(x)
    torch.cuda.synchronize()
    return bool((total == 2).all())


def test_a_timeout_ends_what_waits_on_the_gpu(cluster: ClusterRunner) -> None:
    assert cluster.run(go_on_after_a_timeout, 2, processes=True, timeout_s=120) == [True, True]


async def train_elastic(cluster: shardnet.Cluster, state: elastic.State) -> dict[str, torch.Tensor]:
    return await test_fsdp.train_elastic(await over_nccl(cluster), state)


@pytest.mark.parametrize("after", ["backward", "all_gather"])
def test_a_killed_worker_costs_nothing(cluster: ClusterRunner, after: str) -> None:
    undisturbed = cluster.run(train_elastic, 1, elastic=True, processes=True, timeout_s=80)[0]
    faults = Faults().kill(rank=2, at_step=3, after=after)
    results = cluster.run(train_elastic, 3, elastic=True, min_workers=2, processes=True, faults=faults, timeout_s=120)
    for rank in (0, 1):
        for name, value in undisturbed.items():
            torch.testing.assert_close(results[rank][name], value, rtol=0, atol=2e-5)
