"""Sharded training on a GPU, between processes that share it: results are those of one process, and memory does not grow."""

from typing import Any

import pytest
import torch

import shardnet
from shardnet import elastic
from shardnet.checkpoint import Checkpoints
from shardnet.fsdp import Compression, MixedPrecision
from shardnet.sharding import ShardingStrategy
from shardnet.testing import ClusterRunner, Faults
from tests.devices import needs_gpu
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, optimizer_for

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

STEPS = 6
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "prefetch 0": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "shard_grad_op": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "hybrid_shard": {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2},
    "reshard to 2": {"reshard_after_forward": 2},
    "offload": {"cpu_offload": True},
    "offload hybrid": {"cpu_offload": True, "strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2},
}


def train_alone(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The same in one process, on the GPU."""
    model = make_gpt().cuda()
    optimizer = optimizer_for(model.parameters())
    for batch in token_batches(steps, SAMPLES).cuda():
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


async def train(cluster: shardnet.Cluster, name: str) -> float:
    """Train; return the largest difference between a parameter and that of one process."""
    model = await cluster.shard(make_gpt(seed=cluster.rank).cuda(), units=[Block], **OPTIONS[name])
    optimizer = optimizer_for(model.parameters())
    share = SAMPLES // cluster.world_size
    for batch in token_batches(STEPS, SAMPLES).cuda():
        loss = await model.run(loss_of, model.fsdp, batch[cluster.rank * share :][:share])
        await model.backward(loss)
        await model.step(optimizer)
        optimizer.zero_grad()
    home = "cpu" if "offload" in name else "cuda"
    assert {parameter.device.type for parameter in model.parameters()} == {home}
    assert {value.device.type for state in optimizer.state.values() for key, value in state.items() if key != "step"} == {home}
    state, whole = await model.full_state_dict(), train_alone()
    return max(float((state[name].cpu() - value).abs().max()) for name, value in whole.items())


@pytest.mark.parametrize("name", OPTIONS)
def test_training_equals_one_process(cluster: ClusterRunner, name: str) -> None:
    for world_size, nodes in [(4, 2)] if "hybrid" in name or "reshard" in name else [(2, 1), (3, 3)]:
        differences = cluster.run(train, world_size, args=(name,), processes=True, nodes=nodes, timeout_s=80)
        assert max(differences) < 2e-5, (world_size, nodes)


async def train_narrow(cluster: shardnet.Cluster, how: str) -> tuple[float, float]:
    """First and last loss of a model that computes in 16 bits, or sends 8 bits."""
    options: dict[str, Any] = {"mixed_precision": BFLOAT16} if how != "int8" else {}
    if "int8" in how:
        options["compression"] = Compression(weights="int8", gradients="int8")
    if how == "bfloat16 offload":
        options["cpu_offload"] = True
    model = await cluster.shard(make_gpt(seed=cluster.rank).cuda(), units=[Block], **options)
    optimizer, losses = optimizer_for(model.parameters()), []
    for batch in token_batches(20, 6).cuda():
        loss = await model.run(loss_of, model.fsdp, batch[cluster.rank * 3 :][:3])
        await model.backward(loss)
        await model.clip_grad_norm(1.0)
        await model.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("how", ["bfloat16", "bfloat16 int8", "bfloat16 offload", "int8"])
def test_narrow_numbers_learn(cluster: ClusterRunner, how: str) -> None:
    for first, last in cluster.run(train_narrow, 2, args=(how,), processes=True, timeout_s=80):
        assert last < first - 0.01


@pytest.fixture
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the workspace of matrix products is 32 MiB for each thread and stream."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "64")


async def measure_memory(cluster: shardnet.Cluster, cpu_offload: bool) -> dict[str, list[int]]:
    """Bytes that torch has allocated after each step and at each step's peak, and bytes that it has reserved."""
    model = await cluster.shard(make_gpt(width=510, heads=3, layers=8).cuda(), units=[Block], cpu_offload=cpu_offload)
    optimizer = torch.optim.AdamW(model.parameters())
    measured: dict[str, list[int]] = {"after": [], "peak": [], "held": []}
    for batch in token_batches(12, 4).cuda():
        torch.cuda.reset_peak_memory_stats()
        loss = await model.run(loss_of, model.fsdp, batch)
        await model.backward(loss)
        del loss
        await model.step(optimizer)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        measured["after"].append(torch.cuda.memory_allocated())
        measured["peak"].append(torch.cuda.max_memory_allocated())
        measured["held"].append(torch.cuda.memory_reserved())
    measured["parameters"] = [4 * sum(group.layout.numel for group in model.fsdp.groups)]
    measured["unit"] = [max(group.full_bytes for group in model.fsdp.groups)]
    return measured


@pytest.mark.usefixtures("small_workspaces")
def test_memory_is_the_same_after_each_step(cluster: ClusterRunner) -> None:
    for measured in cluster.run(measure_memory, 2, args=(False,), processes=True, timeout_s=80):
        assert len(set(measured["after"][2:])) == 1  # from then on the optimizer has its state
        assert len(set(measured["held"][2:])) == 1
        assert max(measured["peak"][2:]) - min(measured["peak"][2:]) < 1 << 20
        # a rank has half of the parameters and of the two moments; gradients come while full units go
        assert measured["after"][-1] < 1.6 * measured["parameters"][0]
        assert measured["peak"][-1] < 2 * measured["parameters"][0] + 6 * measured["unit"][0]


@pytest.mark.usefixtures("small_workspaces")
def test_with_offload_nothing_stays_on_the_gpu(cluster: ClusterRunner) -> None:
    for measured in cluster.run(measure_memory, 2, args=(True,), processes=True, timeout_s=80):
        assert measured["after"][-1] < 0.05 * measured["parameters"][0]
        assert measured["peak"][-1] < 7 * measured["unit"][0]


async def offload_alone(cluster: shardnet.Cluster) -> float:
    """A world of one, whose shards are whole: on the CPU, and copied to the GPU unit by unit."""
    model = await cluster.shard(make_gpt(), units=[Block], cpu_offload=True)
    optimizer = optimizer_for(model.parameters())
    for batch in token_batches(STEPS, SAMPLES).cuda():
        loss = await model.run(loss_of, model.fsdp, batch)
        await model.backward(loss)
        await model.step(optimizer)
        optimizer.zero_grad()
    whole = train_alone()
    return max(float((value.cpu() - whole[name]).abs().max()) for name, value in (await model.full_state_dict()).items())


def test_offload_in_a_world_of_one(cluster: ClusterRunner) -> None:
    assert cluster.run(offload_alone, 1, processes=True)[0] < 2e-5


async def save_and_load(cluster: shardnet.Cluster, folder: str) -> bool:
    """Whether a checkpoint of shards on a GPU comes back bit for bit."""
    model = await cluster.shard(make_gpt().cuda(), units=[Block])
    optimizer = optimizer_for(model.parameters())
    checkpoints = Checkpoints(cluster.backend, folder, model, optimizer)
    for batch in token_batches(2, 4).cuda():
        await model.backward(await model.run(loss_of, model.fsdp, batch))
        await model.step(optimizer)
    await checkpoints.save(2)
    await checkpoints.wait()
    before = await model.full_state_dict()
    for batch in token_batches(2, 4, seed=2).cuda():
        await model.backward(await model.run(loss_of, model.fsdp, batch))
        await model.step(optimizer)
    await checkpoints.load()
    after = await model.full_state_dict()
    assert all(parameter.is_cuda for parameter in model.parameters())
    return all(torch.equal(value, after[name]) for name, value in before.items())


def test_checkpoints(cluster: ClusterRunner, tmp_path: Any) -> None:
    assert cluster.run(save_and_load, 2, args=(str(tmp_path),), processes=True, timeout_s=80) == [True, True]


async def train_elastic(cluster: shardnet.Cluster, state: elastic.State) -> dict[str, torch.Tensor]:
    model = await cluster.shard(make_gpt().cuda(), units=[Block])
    optimizer = optimizer_for(model.parameters())
    await state.resume(model, optimizer)
    while state.step < 8:
        batch = token_batches(1, 12, seed=state.step)[0].cuda()
        share = len(batch) // cluster.world_size
        await model.backward(await model.run(loss_of, model.fsdp, batch[cluster.rank * share :][:share]))
        await model.step(optimizer)
        optimizer.zero_grad()
        await state.commit(state.step + 1)
    return {name: value.cpu() for name, value in (await model.full_state_dict()).items()}


def test_a_killed_worker_costs_nothing(cluster: ClusterRunner) -> None:
    undisturbed = cluster.run(train_elastic, 1, elastic=True, processes=True, timeout_s=80)[0]
    faults = Faults().kill(rank=2, at_step=3, after="backward")
    results = cluster.run(train_elastic, 3, elastic=True, min_workers=2, processes=True, faults=faults, timeout_s=80)
    for rank in (0, 1):
        for name, value in undisturbed.items():
            torch.testing.assert_close(results[rank][name], value, rtol=0, atol=2e-5)
