"""Losses that are computed directly with parameters: their gradients reach the slices in addition to the reduced ones."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP, MixedPrecision
from shardnet.fsdp.gradients import GradientBuffer
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.lent_gradients import LentGradients
from shardnet.fsdp.reductions import ReductionQueue
from shardnet.fsdp.unit import Unit
from shardnet.sharding import ShardingStrategy
from shardnet.testing import local_cluster, loopback_cluster
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(2, 6, 4)  # two ranks' inputs
STEPS = 3


class Scaled(nn.Module):
    """A model with a scale that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.head, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor([0.5]))
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).add(number).cos().view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


Train = Callable[[nn.Module, Scaled, Tensor], torch.optim.Optimizer]


def penalty(module: nn.Module) -> Tensor:
    """A penalty on biases, which backward does not read: torch would refuse a step of parameters that backward still needs."""
    return torch.stack([each.abs().sum() for name, each in module.named_parameters() if name.endswith("bias")]).sum()


def train_with_penalty(model: nn.Module, inner: Scaled, x: Tensor, *, in_backward: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if isinstance(model, FSDP) and in_backward:
        model.step_in_backward(optimizer)
    for _ in range(STEPS):
        (model(x).square().mean() + 0.1 * penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_with_scale(model: nn.Module, inner: Scaled, x: Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        (model(x) * inner.scale.exp() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_in_parts(model: nn.Module, inner: Scaled, x: Tensor) -> torch.optim.Optimizer:
    """Backwards of the penalty and the scale alone, before and after that of the model, and one before any forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (inner.scale.square() * x.mean()).sum().backward()  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        (0.1 * penalty(model)).backward()  # type: ignore[no-untyped-call]
        model(x).square().mean().backward()
        (inner.scale * x.square().mean()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_by_accumulation(model: nn.Module, inner: Scaled, x: Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        if isinstance(model, FSDP):
            with model.no_sync():
                (model(x[:2]) * inner.scale.exp()).square().mean().backward()
        else:
            (model(x.view(2, 6, 4)[:, :2].flatten(0, 1)) * inner.scale.exp()).square().mean().backward()
        (model(x) * inner.scale.exp() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def compare(train: Train, strategy: ShardingStrategy, units: list[type[nn.Module]] | None) -> None:
    def work(backend: Backend) -> tuple[dict[str, Tensor], set[float]]:
        inner = Scaled()
        model = FSDP(inner, backend, units=units, strategy=strategy)
        optimizer = train(model, inner, X[backend.rank])
        return model.full_state_dict(), {float(state["step"]) for state in optimizer.state.values() if "step" in state}

    alone = Scaled()
    train(alone, alone, X.flatten(0, 1))
    for found, counts in run_ranks(2, work):
        torch.testing.assert_close(found, alone.state_dict(), rtol=0, atol=1e-12)
        assert counts <= {STEPS}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_penalty(strategy: ShardingStrategy, in_backward: bool) -> None:
    compare(partial(train_with_penalty, in_backward=in_backward), strategy, [nn.Sequential])


@pytest.mark.parametrize("units", [None, [nn.Sequential]])
@pytest.mark.parametrize("train", [train_with_scale, train_in_parts, train_by_accumulation])
def test_where_a_rank_has_all_parameters_theirs_are_averaged_too(train: Train, units: list[type[nn.Module]] | None) -> None:
    compare(train, ShardingStrategy.NO_SHARD, units)


@pytest.mark.parametrize("lent", [False, True])
async def test_a_model_that_computes_in_another_dtype(lent: bool) -> None:
    """Also where other ranks read gradients where they are."""

    def work(backend: Backend) -> dict[str, Tensor]:
        inner = Scaled()
        precision = MixedPrecision(torch.float32, torch.float32)
        model = FSDP(inner, backend, strategy=ShardingStrategy.NO_SHARD, mixed_precision=precision)
        assert isinstance(model.groups[0].gradients, LentGradients if lent else GradientBuffer)
        train_with_scale(model, inner, X[backend.rank])
        return model.full_state_dict()

    alone = Scaled()
    train_with_scale(alone, alone, X.flatten(0, 1))
    make = local_cluster if lent else loopback_cluster
    async with make(2) as ranks:
        if lent and not ranks[0].lends_pieces:
            pytest.skip("ranks cannot read each other's memory on this machine")
        first, second = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
    torch.testing.assert_close(first, alone.state_dict(), rtol=0, atol=1e-5)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_model_that_is_whole_again_is_left_alone() -> None:
    def work(backend: Backend) -> Tensor:
        inner = Scaled()
        model = FSDP(inner, backend, strategy=ShardingStrategy.NO_SHARD)
        train_with_scale(model, inner, X[backend.rank])
        module = model.unwrap()
        assert isinstance(module, Scaled)
        (module(X[0]) * module.scale).sum().backward()
        assert module.scale.grad is not None
        return module.scale.grad

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)


class Late(torch.autograd.Function):
    """Brings a gradient to a slice after backward has done everything else: backward does last what was computed first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor) -> Tensor:
        ctx.shape = held.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones(ctx.shape, dtype=gradients[0].dtype)


def test_a_gradient_that_comes_when_its_parameter_was_stepped_is_refused() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Scaled(), backend, units=[nn.Sequential], prefetch=0)
        model.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        last = dict(model.named_parameters())["layers.2.0.bias"]
        x = Late.apply(X[backend.rank].clone().requires_grad_(), last)
        late = r"^the loss uses layers\.2\.0\.bias directly, and that gradient came after the optimizer had stepped the parameter: leave"
        with pytest.raises(StateError, match=late):
            model(x).square().mean().backward()

    run_ranks(2, work)


def test_reductions_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients from elsewhere come first. They must not put the root unit, which is complete last, before units that are ready sooner."""
    started: dict[int, list[str]] = {0: [], 1: []}
    start = ReductionQueue._start

    def note(queue: ReductionQueue, unit: Unit) -> None:
        started[queue._comms.everyone.rank].append(unit.name)
        start(queue, unit)

    def work(backend: Backend) -> None:
        inner = Scaled()
        model = FSDP(inner, backend, units=[nn.Linear], strategy=ShardingStrategy.NO_SHARD)
        model(X[backend.rank]).sum().backward()
        usual = started[backend.rank].copy()
        started[backend.rank].clear()
        (model(X[backend.rank]).sum() + inner.scale.sum()).backward()
        assert started[backend.rank] == usual
        assert usual[0] == "head"

    monkeypatch.setattr(ReductionQueue, "_start", note)
    run_ranks(2, work)


def test_what_no_sync_has_added_up_is_known() -> None:
    def work(backend: Backend) -> Tensor:
        inner = Scaled()
        model = FSDP(inner, backend, strategy=ShardingStrategy.NO_SHARD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X[backend.rank]).sum().backward()
        optimizer.zero_grad()
        with model.no_sync():
            (inner.scale * (backend.rank + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(StateError, match=r"^gradients of no_sync\(\) are not reduced yet"):
            model.check_step(optimizer)
        model.sync_gradients()
        assert inner.scale.grad is not None
        return inner.scale.grad

    for gradient in run_ranks(2, work):
        torch.testing.assert_close(gradient, torch.tensor([1.5], dtype=torch.float64))


class Twice(Scaled):
    """Of which backward steps the layers at its end, since it comes back to them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.layers(x)))  # type: ignore[no-any-return]


def test_one_that_comes_before_its_parameter_is_stepped_counts() -> None:
    def train(model: nn.Module, x: Tensor, share: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(model, FSDP):
            model.step_in_backward(optimizer)
        for _ in range(STEPS):
            held = dict(model.named_parameters())["layers.1.0.bias"]
            late: Tensor = Late.apply(x.clone().requires_grad_(), held)
            (share * model(late).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def work(backend: Backend) -> dict[str, Tensor]:
        model = FSDP(Twice(), backend, units=[nn.Sequential], prefetch=0)
        train(model, X[backend.rank], 1 / 6)
        return model.full_state_dict()

    alone = Twice()
    train(alone, X.flatten(0, 1), 1 / 12)
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, alone.state_dict(), rtol=0, atol=1e-12)


NO_SHARD = ShardingStrategy.NO_SHARD


def sharded(backend: Backend, **options: Any) -> tuple[Scaled, FSDP]:
    inner = Scaled()
    return inner, FSDP(inner, backend, strategy=NO_SHARD, **options)


@pytest.mark.parametrize("in_backward", [False, True])
def test_ranks_may_bring_them_at_different_moments_or_not_at_all(in_backward: bool) -> None:
    """Backward comes last to what was computed before the forward. Even so reductions have one order, and each unit has one reduction."""

    def work(backend: Backend) -> list[Tensor]:
        inner, model = sharded(backend, units=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_backward:
            model.step_in_backward(optimizer)
        for first in (0, 1, 2):
            before = inner.head.bias.sum() if backend.rank == first else torch.zeros(())
            loss = model(X[backend.rank]).mean()
            behind = inner.head.bias.sum() if backend.rank == 0 and first == 1 else torch.zeros(())
            (loss + before + behind).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model.full_state_dict()["head.bias"]]

    alone = Scaled()
    start = alone.head.bias.detach().clone()
    # the mean over two ranks: 1 of the forward in each step, and 1 of a rank's in the first step, of both in the second
    expected = start - 0.1 * (3 * 1.0 + 0.5 + 1.0)
    for (bias,) in run_ranks(2, work):
        torch.testing.assert_close(bias, expected, rtol=0, atol=1e-12)


def test_hooks_of_the_program_are_called_once_with_what_is_reduced() -> None:
    def work(backend: Backend) -> tuple[Tensor | None, list[float]]:
        inner, model = sharded(backend)
        seen: list[float] = []

        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.item())

        inner.scale.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        inner.scale.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for _ in range(2):
            ((backend.rank + 1.0) * inner.scale.sum() + 0 * model(X[backend.rank]).mean()).backward()
        return inner.scale.grad, seen

    for gradient, seen in run_ranks(2, work):
        assert gradient is not None
        assert (gradient.item(), seen) == (6.0, [3.0, 6.0])


def test_behind_a_backward_that_has_failed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("in the middle")

    def work(backend: Backend) -> float:
        inner, model = sharded(backend)
        x: Tensor = Failing.apply(X[backend.rank].clone().requires_grad_())
        with pytest.raises(ValueError, match="in the middle"):
            model(x).sum().backward()
        model.zero_grad()
        ((backend.rank + 1.0) * inner.scale.sum()).backward()  # type: ignore[no-untyped-call]
        assert inner.scale.grad is not None
        return inner.scale.grad.item()

    assert run_ranks(2, work) == [1.5, 1.5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_what_is_computed_again(reentrant: bool) -> None:
    """The penalty's gradient comes before backward has reached the forward: what is read then is not part of a unit at work."""

    def work(backend: Backend) -> tuple[Tensor | None, Tensor | None]:
        inner, model = sharded(backend)
        scaled = checkpoint(lambda y: y * inner.scale, model(X[backend.rank]), use_reentrant=reentrant)
        assert isinstance(scaled, Tensor)
        (scaled.sum() + inner.head.bias.sum()).backward()  # type: ignore[no-untyped-call]
        return inner.scale.grad, inner.head.bias.grad

    alone = Scaled()
    ((alone(X.flatten(0, 1)) * alone.scale).sum() / 2 + alone.head.bias.sum()).backward()
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, (alone.scale.grad, alone.head.bias.grad), rtol=0, atol=1e-12)


def test_of_parameters_that_were_frozen_when_they_were_sharded() -> None:
    def work(backend: Backend) -> float:
        inner = Scaled().requires_grad_(False)
        model = FSDP(inner, backend, strategy=NO_SHARD)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with torch.inference_mode():
            model(X[0])
        inner.scale.requires_grad_()
        with torch.inference_mode():
            model(X[0])
        ((backend.rank + 1.0) * inner.scale.sum()).backward()  # type: ignore[no-untyped-call]
        assert inner.scale.grad is not None
        return inner.scale.grad.item()

    assert run_ranks(2, work) == [1.5, 1.5]


def test_a_graph_of_them_is_refused() -> None:
    def work(backend: Backend) -> None:
        inner, _ = sharded(backend)
        with pytest.raises(StateError, match=r"^scale: backward\(create_graph=True\) is not supported"):
            inner.scale.square().sum().backward(create_graph=True)  # type: ignore[no-untyped-call]

    run_ranks(2, work)


def test_a_model_that_is_dropped_is_freed_and_its_parameters_are_the_programs() -> None:
    def work(backend: Backend) -> tuple["weakref.ref[FlatGroup]", nn.Parameter]:
        inner, model = sharded(backend)
        train_with_scale(model, inner, X[backend.rank])
        return weakref.ref(model.groups[0]), inner.scale

    kept = run_ranks(2, work)
    gc.collect()  # not by each of the threads: one that finds another one at it does nothing
    for group, scale in kept:
        assert group() is None
        (2 * scale.sum()).backward()  # type: ignore[no-untyped-call]
        assert scale.grad is not None
        assert scale.grad.item() == 2.0


def test_of_a_model_that_was_sharded_without_gradients() -> None:
    def work(backend: Backend) -> float:
        with torch.no_grad():
            inner, _ = sharded(backend)
        ((backend.rank + 1.0) * inner.scale.sum()).backward()  # type: ignore[no-untyped-call]
        assert inner.scale.grad is not None
        return inner.scale.grad.item()

    assert run_ranks(2, work) == [1.5, 1.5]
