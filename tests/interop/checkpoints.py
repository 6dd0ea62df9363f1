"""Programs that save and load whole and sharded states with torch's interfaces; run by forked ranks."""

# mypy: disable-error-code="attr-defined, no-untyped-call, arg-type, union-attr, no-any-return"

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from tests.interop import programs

WHOLE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def _trained(model: nn.Module, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(8, 8)


def saved_in_the_background(rank: int, world_size: int, folder: Path) -> None:
    model = _layer(1)
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=str(folder / "saved")).result()
    loaded = {"model": _layer(2).state_dict()}
    dcp.load(loaded, checkpoint_id=str(folder / "saved"))
    assert _alike(loaded["model"], model.state_dict())
    if rank == 0:
        torch.save({"weight": torch.arange(3.0)}, folder / "plain.pt")
    dist.barrier()
    plain = {"weight": torch.zeros(3)}
    reader = BroadcastingTorchSaveReader()  # in this reader only the first rank reads
    dcp.load(plain, storage_reader=reader, planner=DynamicMetaLoadPlanner(), checkpoint_id=str(folder / "plain.pt"))
    assert plain["weight"].tolist() == [0.0, 1.0, 2.0]


def loaded_by_the_first_rank(rank: int, world_size: int, _: Path) -> None:
    """Only rank 0 has the whole state; the others get their shards from it. torch changes what it is given."""
    first, first_optimizer = _trained(fully_shard(_layer(1)), 1)
    second, second_optimizer = _trained(fully_shard(_layer(2)), 2)
    model_state, optimizer_state = get_state_dict(first, first_optimizer, options=WHOLE)
    set_model_state_dict(second, deepcopy(model_state) if rank == 0 else {}, options=FROM_FIRST)
    set_optimizer_state_dict(second, second_optimizer, deepcopy(optimizer_state) if rank == 0 else {}, options=FROM_FIRST)
    found, found_optimizer = get_state_dict(second, second_optimizer, options=WHOLE)
    assert _alike(found, model_state)
    assert _alike(found_optimizer, optimizer_state)


def sharded_state_of_fsdp1(rank: int, world_size: int, _: Path) -> None:
    wrap = lambda seed: FullyShardedDataParallel(_layer(seed), device_id=torch.device("cpu"), use_orig_params=True)  # noqa: E731
    (first, first_optimizer), (second, second_optimizer) = _trained(wrap(1), 1), _trained(wrap(2), 2)
    with FullyShardedDataParallel.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(first, first_optimizer)
    with FullyShardedDataParallel.state_dict_type(second, StateDictType.SHARDED_STATE_DICT):
        second_optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(second, second_optimizer, state))
    assert _alike(first_optimizer.state_dict(), second_optimizer.state_dict())


def _alike(one: Any, other: Any) -> bool:
    """Compare mappings, lists, and the tensors in them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
