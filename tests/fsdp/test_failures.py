"""Ranks that fail or disagree: the error says who and what, and nothing stays gathered."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, PeerLost, UsageError
from shardnet.fsdp import FSDP, Compression, MixedPrecision
from shardnet.sharding import ShardingStrategy
from tests.contract.conftest import KINDS, cluster
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

BATCH = token_batches(1, 2)[0]


class Tail(torch.nn.Module):
    """Two layers, with options that may differ between ranks."""

    def __init__(self, *, layers: int = 2, frozen: bool = False, buffer: bool = False, width: int = 3, half: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        self.head = torch.nn.Linear(4, width, dtype=torch.float64 if half else None).requires_grad_(not frozen)
        if buffer:
            self.register_buffer("seen", torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "arguments", "text"),
    [
        ({}, {"units": None}, "rank 0 has unit layers.0, but rank 2 has layers.0.weight"),
        ({}, {"units": [torch.nn.Sequential]}, "unit layers.0, but rank 2 has head.weight [3, 4] in"),
        ({}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, "strategy FULL_SHARD, but rank 2 has strategy SHARD_GRAD_OP"),
        ({}, {"reshard_after_forward": False}, "after forward: Resharding(keep=False, neighbours=None), but rank 2"),
        (
            {},
            {"mixed_precision": MixedPrecision(torch.bfloat16)},
            "has layers.0.weight [4, 4] in float32 as bfloat16, reduced as bfloat16",
        ),
        ({}, {"compression": Compression("int8")}, "Compression(weights=None, "),
        ({"layers": 3}, {}, "unit head, but rank 2 has unit layers.2"),
        ({"layers": 1}, {}, "unit layers.1, but rank 2 has unit head"),
        ({"frozen": True}, {}, "reduced as float32, but rank 2 has head.weight [3, 4] in float32, frozen"),
        ({"buffer": True}, {}, "nothing more, but rank 2 has buffer seen [2] in float32"),
        ({"width": 2}, {}, "head.weight [3, 4] in float32, reduced as float32, but rank 2 has head.weight [2, 4] in float32, "),
        ({"half": True}, {}, "in float64, reduced as float64"),
    ],
    ids=str,
)
def test_ranks_that_shard_differently_are_told_so(model: dict[str, Any], arguments: dict[str, Any], text: str) -> None:
    def work(backend: Backend) -> str:
        differs = backend.rank == 2
        module = Tail(**model if differs else {})
        before = list(module.parameters())
        with pytest.raises(CollectiveMismatch) as refused:
            FSDP(module, backend, **{"units": [torch.nn.Linear], **(arguments if differs else {})})
        assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
        FSDP(Tail(), backend, units=[torch.nn.Linear])  # a rank that is told may try again
        return str(refused.value)

    for message in run_ranks(3, work):
        assert "the models to shard differ: rank 0 has " in message
        assert text in message
        assert message.endswith("; give the same model and the same arguments on all ranks")


@pytest.mark.parametrize("kind", KINDS)
async def test_they_are_told_so_on_every_engine(kind: str) -> None:
    strategies = [ShardingStrategy.FULL_SHARD] * 3 + [ShardingStrategy.SHARD_GRAD_OP]
    async with cluster(kind, 4) as ranks:
        makes = [partial(FSDP, torch.nn.Linear(2, 2), rank, strategy=strategy) for rank, strategy in zip(ranks, strategies, strict=True)]
        for error in await asyncio.gather(*map(asyncio.to_thread, makes), return_exceptions=True):
            assert isinstance(error, CollectiveMismatch)
            assert "rank 0 has strategy FULL_SHARD, but rank 3 has strategy SHARD_GRAD_OP" in str(error)


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        ("x", {}, "only an nn.Module can be sharded, got a value of type str"),
        (Tail(), {"prefetch": "1"}, "prefetch must be a number of units, 0 or more, got '1'"),
        (Tail(), {"prefetch": -1}, "prefetch must be a number of units, 0 or more, got -1"),
        (Tail(), {"prefetch": True}, "prefetch must be a number of units, 0 or more, got True"),
        (Tail(), {"mixed_precision": torch.bfloat16}, "mixed_precision must be a MixedPrecision, such as .*, got torch.bfloat16"),
        (Tail(), {"compression": "int8"}, "compression must be a Compression, such as .*, got 'int8'"),
    ],
)
def test_arguments_of_another_kind_are_refused(module: Any, arguments: dict[str, Any], text: str) -> None:
    (backend,) = LoopbackBackend.create_group(1)
    with pytest.raises(UsageError, match=text):
        FSDP(module, backend, **arguments)
    backend.abort()


def test_ranks_that_use_units_in_another_order_are_told_so() -> None:
    def work(backend: Backend) -> str:
        inner = make_gpt()
        model = FSDP(inner, backend, units=[Block], prefetch=0)
        inner.blocks = torch.nn.ModuleList(reversed(inner.blocks)) if backend.rank else inner.blocks
        with pytest.raises(CollectiveMismatch) as refused:
            model(BATCH[:, :-1])
        check_at_rest(model)
        return str(refused.value)

    for message in run_ranks(2, work):
        assert "blocks.0" in message
        assert "blocks.2" in message


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_peer_lost_before_forward(prefetch: int) -> None:
    wrapped = threading.Barrier(2)  # a barrier of threads: nothing may be under way when the rank goes

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], prefetch=prefetch)
        wrapped.wait()
        if backend.rank == 1:
            backend.abort()
            return
        with pytest.raises(CollectiveError, match="rank 1"):
            model(BATCH[:, :-1])
        check_at_rest(model)

    run_ranks(2, work)


def test_a_peer_lost_before_backward() -> None:
    forward_done = threading.Barrier(2)

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block])
        loss = loss_of(model, BATCH)
        forward_done.wait()
        if backend.rank == 1:
            backend.abort()
            return
        with pytest.raises(CollectiveError, match="rank 1"):
            loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(CollectiveError, match="rank 1"):
            model(BATCH[:, :-1])  # cleans up first, and then fails as it must
        check_at_rest(model)

    run_ranks(2, work)


def test_the_users_collectives_may_come_at_any_time() -> None:
    """Each rank reduces something of its own at another place between the gathers."""

    def work(backend: Backend) -> list[float]:
        inner = make_gpt()
        results = []

        def meanwhile(*_: object) -> None:
            results.append(backend.all_reduce(torch.tensor([backend.rank + 1.0])))

        inner.blocks[2 * backend.rank].register_forward_pre_hook(meanwhile)
        model = FSDP(inner, backend, units=[Block])
        for _ in range(3):
            loss_of(model, BATCH).backward()  # type: ignore[no-untyped-call]
        return [pending.wait().item() for pending in results]

    assert run_ranks(2, work) == [[3.0] * 3] * 2


def test_a_closed_backend_leaves_nothing_gathered() -> None:
    wrapped = threading.Barrier(2)

    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        wrapped.wait()
        backend.abort()
        with pytest.raises((ClosedError, PeerLost)):
            model(torch.tensor(1.0))
        check_at_rest(model)

    run_ranks(2, work)
