"""Gradients that other ranks read where autograd has put them: which ones, that no bit depends on it, and how many exist at once."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend, Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.config import KIB, Limits
from shardnet.fsdp import FSDP, Compression, MixedPrecision, ShardingStrategy
from shardnet.fsdp.lent_gradients import LentGradients
from shardnet.fsdp.memory import Gauge
from shardnet.sharding import FlatLayout
from shardnet.testing import local_cluster, loopback_cluster
from shardnet.transport.shared_memory import futex

LIMITS = Limits(chunk_bytes=8 * KIB, window_bytes=32 * KIB, inline_bytes=64, eager_bytes=KIB)
NEEDS_LETTERS = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")


class Layer(nn.Module):
    """One weight is used twice, one not at all on odd ranks, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow, self.rare = nn.Linear(40, 80), nn.Linear(80, 40), nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(40), requires_grad=False)

    def forward(self, x: torch.Tensor, *, rare: bool) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.tanh(self.widen(x))) + F.linear(x * self.scale, self.narrow.weight @ self.widen.weight)
        return out + self.rare(x) if rare else out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 40, sparse=True)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: torch.Tensor, *, rare: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rare=rare)
        assert isinstance(x, torch.Tensor)
        return x


ORIGINAL = Net()


def train(backend: Backend, **options: Any) -> list[torch.Tensor]:
    model = FSDP(copy.deepcopy(ORIGINAL), backend, units=[Layer], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(backend.rank)
    for step in range(4):
        for part in range(2):
            tokens = torch.randint(30, (3, 5), generator=generator)
            if part or step % 2:
                model(tokens, rare=backend.rank % 2 == 0).square().mean().backward()
            else:
                with model.no_sync():
                    model(tokens, rare=True).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert model.memory.full_gradients.current_bytes == 0
    return list(model.full_state_dict().values())


def all_at_once(ranks: Sequence[Backend], work: Callable[[Backend], Any]) -> Any:
    return asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))


@NEEDS_LETTERS
@pytest.mark.parametrize(
    ("strategy", "method"),
    [(ShardingStrategy.FULL_SHARD, "reduce_scatter_pieces"), (ShardingStrategy.NO_SHARD, "all_reduce_pieces")],
)
async def test_no_bit_depends_on_it(strategy: ShardingStrategy, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are missing or sparse, or come from several uses or several backwards."""
    lent: list[int] = []
    reduce = getattr(MeshBackend, method)

    def count(self: MeshBackend, pieces: Sequence[torch.Tensor], *args: Any, **options: Any) -> Pending[torch.Tensor]:
        lent.append(len(pieces))
        handle = reduce(self, pieces, *args, **options)
        assert isinstance(handle, Pending)
        return handle

    def work(backend: Backend) -> list[torch.Tensor]:
        return train(backend, strategy=strategy)

    async with loopback_cluster(3, limits=LIMITS) as reference:
        expected = (await all_at_once(reference, work))[0]
    monkeypatch.setattr(MeshBackend, method, count)
    async with local_cluster(3, limits=LIMITS) as ranks:
        for state in await all_at_once(ranks, work):
            assert all(torch.equal(value, other) for value, other in zip(state, expected, strict=True))
    per_backward = [6, 6, 6, 1]  # three layers without the frozen parameter, and the embedding
    assert sorted(lent) == sorted(per_backward * 3 * 6)


@NEEDS_LETTERS
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, True),
        ({"strategy": ShardingStrategy.NO_SHARD}, True),
        ({"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2}, True),
        ({"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}, False),
        ({"mixed_precision": MixedPrecision(torch.bfloat16)}, False),
        ({"mixed_precision": MixedPrecision(None, torch.float64)}, False),
        ({"compression": Compression(gradients="int8")}, False),
        ({"compression": Compression(weights="int8")}, True),
    ],
)
async def test_which_are(options: dict[str, Any], expected: bool) -> None:
    def work(backend: Backend) -> bool:
        model = FSDP(copy.deepcopy(ORIGINAL), backend, units=[Layer], **options)
        kinds = {isinstance(group.gradients, LentGradients) for group in model.groups}
        assert len(kinds) == 1
        return kinds.pop()

    async with local_cluster(4, limits=LIMITS) as ranks:
        assert await all_at_once(ranks, work) == [expected] * 4
    for where in ({"lending": False}, {"shared_memory": False}, {"ranks_per_node": 1}):
        async with local_cluster(4, limits=LIMITS, **where) as ranks:
            assert await all_at_once(ranks, work) == [False] * 4


def gradients(*shapes: tuple[int, ...]) -> tuple[LentGradients, Gauge]:
    gauge = Gauge()
    return LentGradients(FlatLayout([(str(n), shape) for n, shape in enumerate(shapes)], 2), torch.float32, gauge=gauge), gauge


def test_a_gradient_is_kept_where_it_is() -> None:
    lent, _ = gradients((2, 3), (4,))
    first, empty = torch.ones(4), [lent.empty]
    lent.add(1, first)
    empty.append(lent.empty)
    missing, second = lent.take()
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(missing, torch.zeros(2, 3))
    assert [*empty, lent.empty] == [True, False, True]


def test_memory_that_autograd_has_given_twice_is_not_added_to() -> None:
    """Two leaves may have gradients in the same memory, and the caller may still use the tensors that it gave to backward."""
    shared = torch.ones(4)
    for outlives in (False, True):
        lent, _ = gradients((4,), (4,))
        lent.add(0, shared.view(4))
        lent.add(1, shared.view(4))
        if outlives:
            lent.outlive_backward()
            assert all(each.data_ptr() != shared.data_ptr() for each in lent._kept.values())
        for index in range(2):
            lent.add(index, torch.full((4,), 2.0))
            lent.add(index, torch.full((4,), 4.0))
        assert [each.tolist() for each in lent.take()] == [[7.0] * 4] * 2
        assert shared.tolist() == [1.0] * 4


def test_what_is_not_dense_and_in_order_is_copied() -> None:
    lent, _ = gradients((2, 3), (3, 2))
    lent.add(0, torch.arange(6.0).view(3, 2).t())
    lent.add(1, torch.tensor([[0.0, 0.0], [0.0, 0.0], [5.0, 6.0]]).to_sparse())
    turned, dense = lent.take()
    assert turned.is_contiguous()
    assert turned.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert dense.tolist() == [[0, 0], [0, 0], [5, 6]]


def test_what_is_kept_counts_until_it_is_returned() -> None:
    lent, gauge = gradients((2, 3), (4,))
    lent.add(0, torch.ones(2, 3))
    assert gauge.current_bytes == 24
    taken = lent.take()
    lent.add(1, torch.ones(4))
    assert gauge.current_bytes == 24 + 16 + 16
    lent.returned(taken)
    assert gauge.current_bytes == 16
    lent.clear()
    assert (gauge.current_bytes, gauge.peak_bytes, lent.empty) == (0, 56, True)
