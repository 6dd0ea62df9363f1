"""`step_in_backward`: each unit is stepped as soon as its gradients are reduced, and nothing else changes."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, Compression, MixedPrecision, ShardingStrategy
from shardnet.performance import PerformanceRecorder
from shardnet.testing import loopback_cluster
from tests.fsdp.ranks import run_ranks

Optimizers = Callable[[FSDP], list[torch.optim.Optimizer]]
UNITS = 6


class Layer(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x = self.apply_once(self.apply_once(x))
        return x + torch.tanh(self.norm(self.linear(x)))

    def apply_once(self, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.linear, x, use_reentrant=True)
        assert isinstance(out, torch.Tensor)
        return out


ORIGINAL = nn.Sequential(nn.Linear(8, 8, bias=False), *(Layer() for _ in range(UNITS)), nn.Linear(8, 1, bias=False))


# groups that compute with the shard itself, if a rank has all of it, beside groups that are cast
NARROW = MixedPrecision(
    torch.bfloat16, torch.float32, torch.float32, param_dtype_override_fn=lambda parameter: torch.float32 if parameter.dim() == 1 else None
)


def shard(backend: Backend, **options: Any) -> FSDP:
    return FSDP(copy.deepcopy(ORIGINAL), backend, units=[Layer], **options)


def losses(model: FSDP, rank: int, count: int = 5) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(4, 8, generator=generator)
        yield F.mse_loss(model(x), x.sum(dim=1, keepdim=True))


def adamw(model: FSDP) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def of_two_kinds(model: FSDP) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    rates: list[dict[str, Any]] = [
        {"params": [p for n, p in named if "norm" in n], "lr": 0.1},
        {"params": [p for n, p in named if "linear" in n]},
    ]
    rest = [p for n, p in named if "norm" not in n and "linear" not in n]
    return [torch.optim.SGD(rates, lr=0.01, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def train(backend: Backend, optimizers: Optimizers, *, in_backward: bool, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Five steps, two of which have another micro-batch before them."""
    model = shard(backend, **options)
    made = optimizers(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in made]
    if in_backward:
        model.step_in_backward(*made)
    seen: list[float] = []
    for step, loss in enumerate(losses(model, backend.rank, 7)):
        seen.append(loss.item())
        if step in (1, 4):
            with model.no_sync():
                loss.backward()  # type: ignore[no-untyped-call]
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        for each, schedule in zip(made, schedules, strict=True):
            each.step()  # the call may stay in the loop
            each.zero_grad()
            schedule.step()
    return seen, list(model.full_state_dict().values())


@pytest.mark.parametrize("optimizers", [adamw, of_two_kinds])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"prefetch": 0}),
        (2, {"prefetch": 3}),
        (3, {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
        (2, {"strategy": ShardingStrategy.NO_SHARD}),
        (4, {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2}),
        (4, {"reshard_after_forward": 2}),
        (2, {"compression": Compression(weights="int8", gradients="int8")}),
        (1, {"mixed_precision": NARROW}),
        (2, {"mixed_precision": NARROW}),
        (2, {"mixed_precision": NARROW, "strategy": ShardingStrategy.NO_SHARD}),
    ],
)
def test_no_bit_differs_from_steps_behind_backward(optimizers: Optimizers, ranks: int, options: dict[str, Any]) -> None:
    def work(backend: Backend) -> None:
        seen, state = train(backend, optimizers, in_backward=False, **options)
        again, other = train(backend, optimizers, in_backward=True, **options)
        assert again == seen
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(state, other, strict=True))

    run_ranks(ranks, work)


def test_units_are_stepped_while_backward_goes_on_and_one_at_a_time() -> None:
    def work(backend: Backend) -> None:
        model, stepped, before_first = shard(backend), list[list[str]](), list[int]()
        (optimizer,) = adamw(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def note(*_: object) -> None:
            stepped.append([names[id(p)] for p in model.parameters() if p.grad is not None])

        optimizer.register_step_pre_hook(note)
        assert isinstance(model.module, nn.Sequential)
        model.module[1].register_full_backward_pre_hook(lambda *_: before_first.append(len(stepped)))
        model.step_in_backward(optimizer)
        assert model.steps_in_backward
        for loss in losses(model, backend.rank, 2):
            stepped.clear()
            loss.backward()  # type: ignore[no-untyped-call]
            assert len(stepped) == UNITS + 1
            assert [{name.split(".")[0] for name in unit} for unit in stepped[:UNITS]] == [{str(n)} for n in range(UNITS, 0, -1)]
            assert all(parameter.grad is None for parameter in model.parameters())
        assert min(before_first) >= UNITS - 3  # at most two reductions are under way, and one more begins

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_the_next_forwards_first_units_are_gathered_meanwhile(strategy: ShardingStrategy) -> None:
    """Changes until then are not lost, as with any prefetch."""

    def work(backend: Backend) -> None:
        model = shard(backend, strategy=strategy)
        model.step_in_backward(*adamw(model))
        for loss in losses(model, backend.rank, 3):
            assert not model.has_pending_prefetch
            loss.backward()  # type: ignore[no-untyped-call]
            assert model.has_pending_prefetch == (strategy is not ShardingStrategy.NO_SHARD)
            if strategy is ShardingStrategy.FULL_SHARD:
                assert model.prefetch_forward_params()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            x = torch.ones(2, 8)
            whole = copy.deepcopy(ORIGINAL)
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter.fill_(0.5)
                assert torch.equal(model(x), whole(x))

    run_ranks(2, work)


def test_nothing_changes_for_a_model_that_leaves_it() -> None:
    def work(backend: Backend) -> None:
        model = shard(backend)
        (optimizer,) = adamw(model)
        model.step_in_backward(optimizer)
        model.step_in_backward()
        assert not model.steps_in_backward
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for loss in losses(model, backend.rank, 1):
            loss.backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert all(map(torch.equal, before, model.parameters()))
        assert not model.has_pending_prefetch

    run_ranks(2, work)


def test_gradients_of_no_sync_are_stepped_when_they_are_synchronised() -> None:
    def work(backend: Backend) -> None:
        model = shard(backend)
        (optimizer,) = adamw(model)
        model.step_in_backward(optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with model.no_sync():
            for loss in losses(model, backend.rank, 2):
                loss.backward()  # type: ignore[no-untyped-call]
        assert all(map(torch.equal, before, model.parameters()))
        with pytest.raises(StateError, match="between steps"):
            model.step_in_backward()
        model.sync_gradients()
        assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True) if new.numel())
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_a_backward_that_raises_leaves_nothing_for_the_next_one(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> None:
        model = shard(backend, strategy=strategy)
        model.step_in_backward(*adamw(model))

        def fail(*_: object) -> None:
            raise ValueError("in the middle")

        assert isinstance(model.module, nn.Sequential)
        handle = model.module[2].register_full_backward_pre_hook(fail)
        for loss in losses(model, backend.rank, 1):
            with pytest.raises(ValueError, match="in the middle"):
                loss.backward()  # type: ignore[no-untyped-call]
        handle.remove()
        before = next(losses(model, backend.rank, 1))  # its forward restores the usual order
        assert all(parameter.grad is None for parameter in model.parameters())
        before.backward()  # type: ignore[no-untyped-call]
        for loss in losses(model, backend.rank, 3):
            loss.backward()  # type: ignore[no-untyped-call]
        gathered = model.memory.full_parameters.current_bytes > 0  # for the next forward
        assert gathered == (strategy is ShardingStrategy.FULL_SHARD)
        model.settle()
        assert model.memory.full_parameters.current_bytes == model.memory.full_gradients.current_bytes == 0

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_an_optimizer_that_raises_leaves_nothing_for_the_next_step(strategy: ShardingStrategy) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no step")

    def work(backend: Backend) -> None:
        model = shard(backend, strategy=strategy)
        (optimizer,) = adamw(model)
        model.step_in_backward(optimizer)
        handle = optimizer.register_step_pre_hook(fail)
        for loss in losses(model, backend.rank, 1):
            with pytest.raises(ValueError, match="no step"):
                loss.backward()  # type: ignore[no-untyped-call]
        handle.remove()
        for loss in losses(model, backend.rank, 3):
            assert all(parameter.grad is None for parameter in model.parameters())
            loss.backward()  # type: ignore[no-untyped-call]

    run_ranks(1 if strategy is ShardingStrategy.FULL_SHARD else 2, work)


class Shared(nn.Module):
    """A weight whose first use contributes no gradient, so all its gradients are there before backward reaches that use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) / 2)

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        for use in uses:
            x = torch.tanh(x @ (self.weight.detach() if use == "-" else self.weight))
        return x


class Net(nn.Module):
    def __init__(self, uses: tuple[str, str]) -> None:
        super().__init__()
        self.first, self.shared, self.layers = nn.Linear(8, 8), Shared(), nn.Sequential(*(Layer() for _ in range(UNITS)))
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.uses[0]:
            x = self.shared(x, self.uses[0])
        x = self.layers(x)
        out = self.shared(x, self.uses[1])
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("uses", [("", "-+"), ("-", "+")], ids=["in one call", "in another call"])
def test_what_backward_will_read_again_is_stepped_when_it_has_ended(strategy: ShardingStrategy, uses: tuple[str, str]) -> None:
    """Otherwise it would be the backward of a different forward."""
    net = Net(uses)

    def train_it(backend: Backend, *, in_backward: bool) -> list[torch.Tensor]:
        model = FSDP(copy.deepcopy(net), backend, units=[Layer, Shared], strategy=strategy)
        (optimizer,) = adamw(model)
        if in_backward:
            model.step_in_backward(optimizer)
        for step in range(4):
            model(torch.full((2, 8), backend.rank + step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.full_state_dict().values())

    def work(backend: Backend) -> None:
        behind, within = (train_it(backend, in_backward=in_backward) for in_backward in (False, True))
        assert all(map(torch.equal, behind, within))

    run_ranks(2, work)


def test_what_cannot_be() -> None:
    def work(backend: Backend) -> None:
        model = shard(backend)
        (optimizer,) = adamw(model)
        some = torch.optim.AdamW([parameter for name, parameter in model.named_parameters() if name != "3.norm.bias"])
        with pytest.raises(UsageError, match=r"3\.norm\.bias is in none of the optimizers"):
            model.step_in_backward(some)
        other = torch.optim.AdamW([nn.Parameter(torch.ones(3, 2))])
        with pytest.raises(UsageError, match=r"AdamW .* parameter of shape \[3, 2\] that this model does not shard"):
            model.step_in_backward(optimizer, other)
        for loss in losses(model, backend.rank, 1):
            loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(UsageError, match="gradients already"):
            model.step_in_backward(optimizer)
        optimizer.zero_grad()
        model.step_in_backward(optimizer)
        with pytest.raises(StateError, match="clipping needs all"):
            model.clip_grad_norm_(1.0)

    run_ranks(2, work)


def test_a_unit_that_is_reduced_twice_is_an_error() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(nn.Linear(8, 8), Layer(reentrant=True)), backend, units=[Layer])
        model.step_in_backward(*adamw(model))
        with pytest.raises(StateError, match="reduced twice in one backward"):
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()

    run_ranks(2, work)


def test_the_recorder_counts_steps_as_ever() -> None:
    def work(backend: Backend) -> None:
        for in_backward in (False, True):
            model = shard(backend)
            (optimizer,) = adamw(model)
            if in_backward:
                model.step_in_backward(optimizer)
            with PerformanceRecorder(model, optimizer) as recorder:
                for loss in losses(model, backend.rank, 4):
                    recorder.count(samples=4)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
            figures = recorder.figures()
            assert (figures.steps, figures.samples, recorder.zero3.optimizer_steps) == (4, 16, 4)
            assert 0 < recorder.zero3.total_optimizer_time < figures.compute_s * 1e9
            assert set(recorder.zero3.layer_timings) == {unit.name for unit in model.units}
            steps = recorder.zero3.optimizer_steps
            with model.no_sync():
                next(losses(model, backend.rank, 1)).backward()  # type: ignore[no-untyped-call]
            assert recorder.zero3.optimizer_steps == steps

    run_ranks(2, work)


def test_a_rank_that_holds_nothing_has_made_the_step_too() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(nn.Linear(1, 1)), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.step_in_backward(optimizer)
        with PerformanceRecorder(model, optimizer) as recorder:
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
        assert recorder.figures().steps == 3

    run_ranks(4, work)


async def test_in_an_async_program() -> None:
    async with loopback_cluster(1) as (rank,), AsyncFSDP(copy.deepcopy(ORIGINAL), rank, units=[Layer]) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model.step_in_backward(optimizer)
        seen = []
        for _ in range(20):
            loss = ((await model(torch.ones(2, 8))) - 5.0).square().mean()
            await model.backward(loss)
            await model.step(optimizer)
            seen.append(loss.item())
        assert seen[-1] < seen[0]
