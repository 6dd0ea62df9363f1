"""A model that reads its parts' parameters outside of their forwards."""

from collections.abc import Callable

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
Reading = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    """Does something with its parts' parameters before, between and after their forwards, and from another part's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)
        self.norm = nn.LayerNorm(2, bias=False)
        self.before: Reading | None = None
        self.between: Reading | None = None
        self.after: Reading | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._read(self.before, x)
        out: Tensor = self._read(self.between, self.embedding(x))
        return self._read(self.after, self.norm(out))

    def _read(self, reading: Reading | None, x: Tensor) -> Tensor:
        return x if reading is None else reading(self, x)


def wrapped(
    backend: Backend, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, intra_node_size: int | None = None
) -> tuple[Reader, FSDP]:
    reader = Reader()
    return reader, FSDP(reader, backend, units=(nn.Embedding, nn.LayerNorm), strategy=strategy, intra_node_size=intra_node_size)


TOKENS = torch.arange(6).reshape(2, 3)


def in_its_forward(work: Callable[[Reader], object], *, world_size: int = 2, whole: bool = True) -> None:
    """Call `work` on all ranks within a forward, and go on with backward, which must then reach every parameter.

    whole  of the model; or of the module inside
    """

    def read(reader: Reader, x: Tensor) -> Tensor:
        work(reader)
        return x

    def rank(backend: Backend) -> None:
        reader, model = wrapped(backend)
        originals = list(model.parameters())
        reader.between = read
        (model if whole else reader)(TOKENS).sum().backward()
        check_at_rest(model)
        assert all(one is other and one.grad is not None for one, other in zip(model.parameters(), originals, strict=True))

    run_ranks(world_size, rank)


def refused(read: Callable[[], Tensor]) -> list[str]:
    """The error about a read; [] if it is not refused."""
    try:
        read().sum()
    except StateError as error:
        return [str(error).split()[0]]
    return []
