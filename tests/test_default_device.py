"""`torch.set_default_device` is for tensors that a program makes. Tensors that shardnet makes for itself stay where they always were.

The device "meta" stands in for a GPU: a tensor that is made there by mistake has no values, and cannot be sent."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardnet
from shardnet import Cluster
from shardnet.elastic import State
from shardnet.fsdp import Compression, GradScaler
from shardnet.testing import ClusterRunner, Faults
from shardnet.zero import ZeroOptimizer

SOURCES = Path(shardnet.__file__).parent
MAKERS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
}
MAKERS |= {"randperm", "scalar_tensor", "tensor", "zeros"}
STEPS = 4


def test_whatever_is_made_says_where() -> None:
    calls = [(path, call) for path in sorted(SOURCES.rglob("*.py")) for call in _makers(path)]
    assert len(calls) > 50
    assert [f"{path}:{call.lineno}" for path, call in calls if not any(each.arg in ("device", None) for each in call.keywords)] == []


def _makers(path: Path) -> list[ast.Call]:
    """Calls such as `torch.zeros(...)`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call for call in calls if ast.unparse(call.func).removeprefix("torch.") in MAKERS and ast.unparse(call.func).startswith("torch.")
    ]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)).to("cpu")


def _batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank), device="cpu")


async def shards(cluster: Cluster, state: State, device: str) -> list[dict[str, torch.Tensor]]:
    """An elastic sharded training, in which states move and are saved."""
    torch.set_default_device("cpu")
    model = await cluster.shard(_model(), units=(nn.Sequential,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)  # before torch 2.13 Adam makes tensors on the default device
    torch.set_default_device(device)
    await state.resume(model, optimizer)
    while state.step < STEPS:
        x = _batch(state.step)
        await model.backward(F.mse_loss(await model(x), x.sum(dim=1, keepdim=True)))
        await model.clip_grad_norm(1.0)
        await model.step(optimizer)
        optimizer.zero_grad()
        await cluster.mean(1.0)
        await state.commit(state.step + 1)
    return [await model.full_state_dict()]


@pytest.mark.parametrize("faults", [None, Faults().kill(rank=1, at_step=2).join(at_step=3)], ids=["", "a worker goes, another one comes"])
def test_elastic_training(runner: ClusterRunner, faults: Faults | None, tmp_path: Path) -> None:
    def train(device: str) -> dict[str, torch.Tensor]:
        return runner.run(shards, 2, args=(device,), elastic=True, processes=True, faults=faults)[0][0]  # type: ignore[no-any-return]

    meant, found = train("cpu"), train("meta")
    assert all(torch.equal(found[name], meant[name]) for name in meant)


async def others(cluster: Cluster, device: str) -> list[Any]:
    """Everything else that exchanges data of its own: ZeRO, scalers, compression, uneven batches, saved states."""
    torch.set_default_device("cpu")
    module, sharded = (
        _model(),
        await cluster.shard(_model(), units=(nn.Sequential,), compression=Compression(weights="int8", gradients="int8")),
    )
    torch.set_default_device(device)
    zero = ZeroOptimizer(module.parameters(), torch.optim.SGD, cluster.backend, module=module, lr=1e-2, momentum=0.9)
    scaler = GradScaler(cluster.backend)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        x = _batch(step, cluster.rank)
        module(x).square().mean().backward()
        zero.clip_grad_norm_(1.0)
        zero.step()
        zero.zero_grad()
        await sharded.backward(scaler.scale((await sharded(x)).square().mean()))
        await sharded.step(optimizer, scaler)
        optimizer.zero_grad()
    async for part in sharded.uneven([_batch(step, cluster.rank) for step in range(2 + cluster.rank)]):
        await sharded.backward(part.weight * (await sharded(part.batch)).square().mean())
    full = await sharded.full_state_dict()
    await sharded.load_full_state_dict(full)
    return [full, module.state_dict(), zero.consolidated_state_dict()["state"]]


def test_all_else(runner: ClusterRunner) -> None:
    meant, found = (runner.run(others, 2, args=(device,), processes=True, nodes=2)[0] for device in ("cpu", "meta"))
    torch.testing.assert_close(found, meant, rtol=0, atol=0)
