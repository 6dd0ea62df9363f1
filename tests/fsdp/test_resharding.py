"""`reshard_after_forward`: what is kept between forward and backward changes traffic and memory, but no bit of the result."""

import asyncio
import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, MixedPrecision, memory_report
from shardnet.sharding import ShardingStrategy
from shardnet.testing import each_rank, local_cluster
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
HALF = MixedPrecision(torch.bfloat16, torch.float32)


def gathers(model: FSDP) -> tuple[int, int]:
    """How many gathers there were over all ranks that share the parameters, and over this rank's neighbours."""
    comms: Any = model._comms
    return comms.gathers._group._ledger._next, comms.neighbours._group._ledger._next if comms.neighbours else 0


def gathers_of(model: FSDP, work: Any) -> tuple[int, int]:
    before = gathers(model)
    work()
    return gathers(model)[0] - before[0], gathers(model)[1] - before[1]


# --- parity


def train(backend: Backend, explicit: bool = False, **options: Any) -> dict[str, Tensor]:
    """Three steps of two micro-batches, with an evaluation after each."""
    model = FSDP(make_gpt(), backend, units=[Block], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in token_batches(3, 2 * backend.world_size):
        first, second = batch[2 * backend.rank :][:2].split(1)
        with model.no_sync():
            loss_of(model, first).backward()  # type: ignore[no-untyped-call]
        loss_of(model, second).backward()  # type: ignore[no-untyped-call]
        check_at_rest(model)
        assert memory_report(model).secondary_shards == 0
        if explicit:
            model.prefetch_forward_params()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, second)
        assert memory_report(model).secondary_shards == 0
    return model.full_state_dict()


@cache
def plain(world_size: int, policy: MixedPrecision | None) -> dict[str, Tensor]:
    return run_ranks(world_size, lambda backend: train(backend, mixed_precision=policy))[0]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {"reshard_after_forward": 2}),
        (4, {"reshard_after_forward": 2, "prefetch": 0}),
        (4, {"reshard_after_forward": 2, "prefetch": 2}),
        (4, {"reshard_after_forward": 2, "explicit": True}),
        (4, {"reshard_after_forward": 2, "mixed_precision": HALF}),
        (4, {"reshard_after_forward": 2, "strategy": HYBRID, "intra_node_size": 4}),
        (4, {"reshard_after_forward": True}),
        (4, {"reshard_after_forward": False}),
        (6, {"reshard_after_forward": 2}),
        (6, {"reshard_after_forward": 3}),
    ],
)
def test_no_bit_differs_from_full_shard(world_size: int, options: dict[str, Any]) -> None:
    expected = plain(world_size, options.get("mixed_precision"))
    for state in run_ranks(world_size, lambda backend: train(backend, **options)):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


async def test_no_bit_differs_over_grpc() -> None:
    async def work(backend: Backend) -> dict[str, Tensor]:
        return await asyncio.to_thread(train, backend, reshard_after_forward=2)

    expected = await asyncio.to_thread(plain, 4, None)
    async with local_cluster(4) as backends:
        for state in await each_rank(backends, work):
            assert all(torch.equal(value, expected[name]) for name, value in state.items())


# --- traffic


@pytest.mark.parametrize(("prefetch", "held"), [(0, 1), (1, 2), (2, 3)])
def test_backward_gathers_from_neighbours_alone(prefetch: int, held: int) -> None:
    """The root and the last `prefetch` blocks are held; the others come from the two neighbours."""
    blocks = 5

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(layers=blocks), backend, units=[Block], prefetch=prefetch, reshard_after_forward=2)
        members = model._comms.neighbours._group.members  # type: ignore[union-attr]
        assert members == ((0, 1), (2, 3))[backend.rank // 2]
        for batch in token_batches(2, 1):
            losses: list[Tensor] = []
            assert gathers_of(model, lambda batch=batch, losses=losses: losses.append(loss_of(model, batch))) == (1 + blocks, 0)
            assert gathers_of(model, losses[0].backward) == (0, 1 + blocks - held)

    run_ranks(4, work)


def test_backward_sends_what_one_neighbour_lacks() -> None:
    """A rank sends N/4 to each of three ranks in forward, and N/2 to one in backward."""
    size = 64

    def work(backend: Backend) -> None:
        module = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(3)))
        model = FSDP(module, backend, units=[nn.Linear], prefetch=0, reshard_after_forward=2)

        def sent() -> int:
            return backend.telemetry.ops["all_gather"].bytes

        out = model(torch.ones(1, size))
        forward = sent()
        out.sum().backward()
        assert forward == 3 * 3 * (size * size * 4 // 4)
        assert sent() - forward == 3 * (size * size * 4 // 2)  # the root has no parameters: no layer is held

    run_ranks(4, work)


def test_a_kept_model_is_gathered_once() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], reshard_after_forward=False)
        batch = token_batches(1, 1)[0]
        assert gathers_of(model, lambda: loss_of(model, batch).backward()) == (4, 0)  # type: ignore[no-untyped-call]

    run_ranks(2, work)


@pytest.mark.parametrize(("reentrant", "expected"), [(False, (0, 3)), (True, (3, 0))])
def test_recomputation_gathers_from_neighbours_where_forward_had_gradients(reentrant: bool, expected: tuple[int, int]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.sum()

    def work(backend: Backend) -> None:
        model = FSDP(Checkpointed(), backend, units=[nn.Linear], prefetch=0, reshard_after_forward=2)
        for _ in range(2):
            x = torch.ones(1, 3, requires_grad=True)
            loss = model(x)
            assert gathers_of(model, loss.backward) == expected
            check_at_rest(model)

    run_ranks(4, work)


# --- memory


def test_it_costs_one_kth_of_the_units_that_are_freed() -> None:
    layers = 8
    block = sum(parameter.nbytes for parameter in make_gpt(layers=1).blocks[0].parameters())

    def work(backend: Backend, count: int, policy: MixedPrecision | None) -> int:
        model = FSDP(make_gpt(layers=layers), backend, units=[Block], reshard_after_forward=count, mixed_precision=policy)
        loss = loss_of(model, token_batches(1, 1)[0])
        held = memory_report(model).secondary_shards
        assert held == memory_report(model).peak_secondary_shards
        loss.backward()  # type: ignore[no-untyped-call]
        assert memory_report(model).secondary_shards == 0
        model.memory.reset_peaks()
        assert memory_report(model).peak_secondary_shards == 0
        return held

    freed = (layers - 1) * block  # the last one is held, and the root
    for count, policy, share in ((2, None, freed // 2), (3, None, freed // 3), (2, HALF, freed // 4)):
        for held in run_ranks(6, lambda backend, count=count, policy=policy: work(backend, count, policy)):  # type: ignore[misc]
            assert abs(held - share) <= 4 * layers  # a shard may be one element longer


def test_a_forward_that_raises_leaves_none_behind() -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert memory_report(models[threading.get_ident()]).secondary_shards > 0
            raise ArithmeticError

    models: dict[int, FSDP] = {}

    def work(backend: Backend) -> None:
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), Raising())
        model = models[threading.get_ident()] = FSDP(module, backend, units=[nn.Linear], prefetch=0, reshard_after_forward=2)
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, 3))
        assert memory_report(model).secondary_shards == 0
        check_at_rest(model)

    run_ranks(4, work)


# --- never stale


class Layers(nn.Sequential):
    """y = w₃ · w₂ · w₁ · x, on two elements."""

    def __init__(self) -> None:
        super().__init__(*(Weighted(1, 1, 1, 1) for _ in range(3)))


def sharded(backend: Backend, **options: Any) -> FSDP:
    return FSDP(Layers(), backend, units=[Weighted], prefetch=0, reshard_after_forward=2, **options)


def double(model: FSDP, rank: int) -> None:
    """Only one rank's shard changes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if rank == 3:
                parameter.mul_(2.0)


def test_a_forward_after_an_update_sees_it() -> None:
    def work(backend: Backend) -> list[tuple[float, float]]:
        model = sharded(backend)
        seen = []
        for _ in range(2):
            x = torch.ones((), requires_grad=True)
            y = model(x)
            y.backward()
            assert x.grad is not None
            seen.append((y.item(), x.grad.item()))
            double(model, backend.rank)
        return seen

    assert run_ranks(4, work) == [[(64, 64), (125, 125)]] * 4


def test_an_evaluation_before_backward_sees_an_update_and_backward_goes_to_all_ranks() -> None:
    def work(backend: Backend) -> tuple[float, tuple[int, int]]:
        model = sharded(backend)
        y = model(torch.ones((), requires_grad=True))
        double(model, backend.rank)
        with torch.no_grad():
            evaluated = model(torch.ones(())).item()
        assert memory_report(model).secondary_shards == 0
        return evaluated, gathers_of(model, y.backward)

    assert run_ranks(4, work) == [(125, (3, 0))] * 4


def test_backward_reads_what_its_forward_did() -> None:
    class Kept(nn.Module):
        """The gradient with respect to x is read from the parameter itself, in backward."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def work(backend: Backend) -> list[float]:
        model = FSDP(nn.Sequential(Kept(), Kept()), backend, units=[Kept], prefetch=0, reshard_after_forward=2)
        x = torch.ones(4, requires_grad=True)
        y = model(x).sum()
        for parameter in model.parameters():
            parameter.data.mul_(2.0)  # autograd would refuse it, but does not see it
        y.backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_ranks(4, work) == [[1, 1, 1, 1]] * 4


def test_two_forwards_before_one_backward() -> None:
    def work(backend: Backend) -> tuple[float, tuple[int, int]]:
        model = sharded(backend)
        x = torch.ones((), requires_grad=True)
        y = model(x) + model(2 * x)
        counts = gathers_of(model, y.backward)
        assert x.grad is not None
        return x.grad.item(), counts

    assert run_ranks(4, work) == [(3 * 64, (0, 6))] * 4


def test_a_second_backward_through_the_same_forward_gathers_from_all_ranks() -> None:
    def work(backend: Backend) -> tuple[tuple[int, int], tuple[int, int]]:
        model = sharded(backend)
        y = model(torch.ones((), requires_grad=True))
        return gathers_of(model, lambda: y.backward(retain_graph=True)), gathers_of(model, y.backward)

    assert run_ranks(4, work) == [((0, 3), (3, 0))] * 4


# --- refusals


@pytest.mark.parametrize(
    ("value", "options", "complaint"),
    [
        (1, {}, "a number must divide the 4 ranks that share the parameters, and be neither 1"),
        (4, {}, "use True to keep only the shards"),
        (3, {}, "must divide the 4 ranks"),
        (0, {}, "must divide the 4 ranks"),
        (-2, {}, "must divide the 4 ranks"),
        (2, {"strategy": HYBRID, "intra_node_size": 2}, "must divide the 2 ranks"),
        (True, {"strategy": GRAD}, "SHARD_GRAD_OP keeps parameters until backward; choose FULL_SHARD"),
        (2, {"strategy": GRAD}, "SHARD_GRAD_OP keeps parameters until backward; choose FULL_SHARD"),
        (False, {"strategy": NONE}, "with NO_SHARD there is nothing to reshard"),
        (2.0, {}, "must be a bool or a number of ranks, got 2.0"),
    ],
)
def test_values_that_make_no_sense(value: Any, options: dict[str, Any], complaint: str) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=complaint):
            FSDP(Weighted(), backend, reshard_after_forward=value, **options)

    run_ranks(4, work)
