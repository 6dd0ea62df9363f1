"""Ignored modules: untouched by sharding, and counted once where the whole model is counted."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardnet.backend import Backend, ReduceOp
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, memory_report
from shardnet.sharding import ShardingStrategy
from tests.devices import on_test_device
from tests.fsdp.models import Weighted
from tests.fsdp.parity import check_gradients
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
WORLD_SIZE = 2


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.dense(x))
        return out


class Model(nn.Module):
    """`own` is to be ignored: a weight that is tied to one outside, one that is not, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.own = Own()
        self.last = nn.Linear(5, 5)
        self.last.weight = self.own.dense.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.own(self.first(x)).relu())
        return out


def make(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))
    return model


def sharded(inner: Model, backend: Backend, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FSDP:
    return FSDP(inner, backend, units=lambda name, _: name in ("first", "last"), ignored_modules=[inner.own], strategy=strategy)


def test_nothing_of_an_ignored_module_is_touched() -> None:
    def work(backend: Backend) -> None:
        inner = make(seed=backend.rank)
        inner.own.norm.register_buffer("running_mean", torch.full((5,), float(backend.rank)))
        before = {name: value.clone() for name, value in inner.own.state_dict().items()}
        model = sharded(inner, backend)
        assert inner.own.dense.weight.shape == inner.last.weight.shape == (5, 5)
        assert all(torch.equal(value, before[name]) for name, value in inner.own.state_dict().items())
        assert [placed.name for group in model.groups for placed in group.placed] == ["first.weight", "first.bias", "last.bias"]
        assert dict(model.named_parameters())["own.dense.weight"] is inner.last.weight
        model(torch.ones(4, 3)).sum().backward()
        report = memory_report(model)
        assert report.ignored == 2 * sum(parameter.nbytes for parameter in inner.own.parameters())
        assert report.gradient_shards == report.parameter_shards

    run_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_gradients_that_the_caller_reduces_are_clipped_as_in_one_process(strategy: ShardingStrategy) -> None:
    x = on_test_device(torch.randn(2 * 4, 3, generator=torch.Generator().manual_seed(3), device="cpu"))
    alone = make().eval()
    alone(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)

    def work(backend: Backend) -> float:
        inner = make().eval()
        model = sharded(inner, backend, strategy)
        model(x[4 * backend.rank :][:4]).square().mean().backward()
        for parameter in inner.own.parameters():
            assert parameter.grad is not None
            backend.all_reduce(parameter.grad, ReduceOp.MEAN, out=parameter.grad).wait()
        total = model.clip_grad_norm_(0.1)
        check_gradients(model, alone, model.backend.rank if strategy.frees_after_forward else 0)
        for mine, whole in zip(inner.own.parameters(), alone.own.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad)
        return total.item()

    norms = run_ranks(WORLD_SIZE, work)
    assert norms[0] == norms[1] == pytest.approx(expected.item(), rel=1e-5)


def test_states_have_ignored_modules_as_they_are() -> None:
    def work(backend: Backend) -> None:
        inner = make()
        plain = {name: value.clone() for name, value in inner.state_dict().items()}
        model = sharded(inner, backend)
        full, slices = model.full_state_dict(), model.sharded_state_dict()
        assert list(full) == list(plain)
        assert all(torch.equal(value, plain[name]) for name, value in full.items())
        assert "own.dense.weight" in slices.rest
        model.update_shards(torch.zeros(sum(group.shard.numel() for group in model.groups)))
        with torch.no_grad():
            inner.own.dense.weight.zero_()
        model.load_sharded_state_dict(slices)
        assert all(torch.equal(value, plain[name]) for name, value in model.full_state_dict().items())
        assert isinstance(make(seed=1).load_state_dict(state_dict=full).missing_keys, list)
        assert torch.equal(model.unwrap().state_dict()["last.weight"], plain["last.weight"])

    run_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (lambda inner: [Weighted()], "Weighted that is not a submodule"),
        (lambda inner: [inner], "wrapped module itself"),
        (lambda inner: ["own"], "must hold modules, got 'own'"),
        (lambda inner: [inner.first], r"first \(Linear\) is chosen by units and is also in ignored_modules"),
    ],
)
def test_what_cannot_be_ignored_is_refused(ignored: Callable[[Model], list[nn.Module]], message: str) -> None:
    def work(backend: Backend) -> None:
        inner = make()
        with pytest.raises(UsageError, match=message):
            FSDP(inner, backend, units=[nn.Linear], ignored_modules=ignored(inner))

    run_ranks(1, work)


def test_an_ignored_module_on_meta_is_refused() -> None:
    def work(backend: Backend) -> None:
        inner = make()
        inner.own.to("meta")
        with pytest.raises(UsageError, match=r"own\.dense\.weight is on meta"):
            sharded(inner, backend)

    run_ranks(1, work)
