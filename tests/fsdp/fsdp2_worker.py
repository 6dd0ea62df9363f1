"""The reference runs: the parity models under PyTorch's own sharding over gloo.

Four processes train the cases of cases.py that compute in one dtype: FULL_SHARD is fully_shard, SHARD_GRAD_OP that with
reshard_after_forward=False, HYBRID_SHARD that over a mesh of two dimensions, and NO_SHARD is DistributedDataParallel. In float32
they also train for more steps, on 4 ranks and on 2. Rank 0 writes `FOLDER/<world size>.npz` or `FOLDER/<case>.npz`: the losses of the
combined batch and the parameters after the last step. The processes are forked once everything is imported, before any thread
runs, as this one was (tests/training/worker.py): importing torch and its compiler takes longer than the training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardnet.sharding import ShardingStrategy
from tests.fsdp.cases import BFLOAT16, FLOAT32, Case, make_small, train_share
from tests.fsdp.mixed_training import POLICY
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, STEPS, optimizer_for
from tests.training.forked import forked

WORLD_SIZES = (4, 2)


def train(group: dist.ProcessGroup) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, rank = make_gpt(), dist.get_rank(group)
    _shard(model, DeviceMesh.from_group(group, "cpu"), MixedPrecisionPolicy(), MixedPrecisionPolicy())
    optimizer = optimizer_for(model.parameters())
    share = SAMPLES // dist.get_world_size(group)
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        loss = loss_of(model, batch[rank * share :][:share])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _combined(losses, group), {name: _whole(parameter) for name, parameter in model.named_parameters()}


def train_case(group: dist.ProcessGroup, case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_small()
    replicated = case.strategy is ShardingStrategy.NO_SHARD
    wrapped = DistributedDataParallel(model, process_group=group) if replicated else _sharded(model, group, case)
    losses = train_share(wrapped, dist.get_rank(group), case, partial(_no_sync, wrapped))
    return _combined(losses, group), {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _sharded(model: torch.nn.Module, group: dist.ProcessGroup, case: Case) -> torch.nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    if case.node is not None:
        mesh = init_device_mesh("cpu", (case.world_size // case.node, case.node), mesh_dim_names=("between nodes", "within"))
    policies = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if case.dtype == "bfloat16":
        dtypes = POLICY.param_dtype, POLICY.reduce_dtype
        policies = MixedPrecisionPolicy(*dtypes), MixedPrecisionPolicy(*dtypes, POLICY.output_dtype)
    _shard(model, mesh, *policies, reshard_after_forward=False if case.strategy is ShardingStrategy.SHARD_GRAD_OP else None)
    return model


@contextmanager
def _no_sync(model: torch.nn.Module) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _shard(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    inner: MixedPrecisionPolicy,
    outer: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool | None = None,
) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=inner, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=outer, reshard_after_forward=reshard_after_forward)


def _combined(losses: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return (total / dist.get_world_size(group)).tolist()


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def run_rank(rank: int, folder: Path, dtype: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=max(WORLD_SIZES),
        timeout=timedelta(seconds=60),  # so that a rank whose peers died ends, too
    )
    groups = {world_size: dist.new_group(list(range(world_size))) for world_size in range(1, max(WORLD_SIZES) + 1)}
    mine = {world_size: group for world_size, group in groups.items() if isinstance(group, dist.ProcessGroup)}  # this rank is a member
    for world_size in WORLD_SIZES if dtype == "float32" else ():
        if world_size in mine:
            _write(rank, folder / f"{world_size}.npz", *train(mine[world_size]))
    for case in (*FLOAT32, *BFLOAT16):
        if case.dtype == dtype and case.world_size in mine:
            _write(rank, folder / f"{case}.npz", *train_case(mine[case.world_size], case))
    dist.destroy_process_group()


def _write(rank: int, path: Path, losses: list[float], parameters: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        arrays = {name: value.numpy() for name, value in parameters.items()}
        np.savez(path, losses=np.array(losses), **arrays)  # type: ignore[arg-type]  # a parameter is not called `allow_pickle`


def main(folder: str, dtype: str) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    return forked(max(WORLD_SIZES), lambda rank: run_rank(rank, Path(folder), dtype))
