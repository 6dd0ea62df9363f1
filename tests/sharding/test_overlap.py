"""Parameters that share memory."""

import pytest
import torch
from torch import nn

from shardnet.backend import LoopbackBackend
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP
from shardnet.sharding.overlap import refuse_overlaps
from shardnet.zero import ZeroOptimizer

Tensor = torch.Tensor
BASE = torch.arange(12.0)

APART = {
    "halves": [BASE[:6], BASE[6:]],
    "columns": [BASE.view(3, 4)[:, :2], BASE.view(3, 4)[:, 2:]],
    "nothing": [BASE[:0], BASE[:0], BASE],
    "without memory": [torch.empty(3, device="meta"), torch.empty(3, device="meta")],
}
TOGETHER = {
    "the same": [BASE, BASE[:]],
    "turned": [BASE.view(3, 4), BASE.view(3, 4).t()],
    "a part": [BASE[3:5], BASE],
    "behind another part": [BASE, BASE.view(3, 4)[:, 2:], BASE[8:]],
    "the ends": [BASE[:7], BASE[6:]],
}


def named(tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"p{number}", nn.Parameter(tensor)) for number, tensor in enumerate(tensors)]


@pytest.mark.parametrize("tensors", APART.values(), ids=APART.keys())
def test_apart(tensors: list[Tensor]) -> None:
    refuse_overlaps(named(tensors))


@pytest.mark.parametrize("tensors", TOGETHER.values(), ids=TOGETHER.keys())
def test_together(tensors: list[Tensor]) -> None:
    with pytest.raises(UsageError, match=r"^p\d and p\d are two parameters that share memory"):
        refuse_overlaps(named(tensors))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = nn.Parameter(self.encoder.weight)


async def test_sharding_refuses_them() -> None:
    (backend,) = LoopbackBackend.create_group(1)
    with pytest.raises(UsageError, match=r"decoder\.weight and encoder\.weight are two parameters that share memory.*one nn\.Parameter"):
        FSDP(Tied(), backend)
    module = Tied()
    with pytest.raises(UsageError, match="two parameters that share memory"):
        ZeroOptimizer(module.named_parameters(), torch.optim.SGD, backend, lr=0.1)
    await backend.aclose()
