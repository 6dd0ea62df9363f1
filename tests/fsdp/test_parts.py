"""Modules of the root unit that are called alone: an encoder, an embedding, a head, or the model inside another one."""

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import CollectiveMismatch, StateError
from shardnet.fsdp import FSDP, MixedPrecision
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest, check_gradients
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack

Tensor = torch.Tensor


class Body(nn.Module):
    """Not a unit, but with a parameter of its own and units inside; it calls itself if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.stack = Stack()

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        if again:
            x = self(x, again - 1)
        for layer in self.stack.layers:
            x = layer(x)
        return x * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.body = Body()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(self.stem(x)))
        return out


_made = Model()


def make() -> Model:
    return copy.deepcopy(_made)


def batch(rank: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def wrapped(backend: Backend, **options: object) -> tuple[Model, FSDP]:
    module = make()
    return module, FSDP(module, backend, units=[Layer], **options)  # type: ignore[arg-type]


def piece_by_piece(model: Model, x: Tensor) -> Tensor:
    out: Tensor = model.act(model.body(model.stem(x)))
    return out


def behind_a_forward(model: Model, x: Tensor) -> Tensor:
    out: Tensor = model(x) + model.stem(x).sum()
    return out


def before_a_forward(model: Model, x: Tensor) -> Tensor:
    part = model.stem(x)
    out: Tensor = model(x) + part
    return out


def within_itself(model: Model, x: Tensor) -> Tensor:
    out: Tensor = model.body(model.stem(x), again=2)
    return out


CALLS = pytest.mark.parametrize("call", [piece_by_piece, behind_a_forward, before_a_forward, within_itself])


@CALLS
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_they_train_as_in_one_process(call: Callable[[Model, Tensor], Tensor], strategy: ShardingStrategy) -> None:
    alone = make()
    torch.stack([call(alone, batch(rank)).square().mean() for rank in range(2)]).mean().backward()  # type: ignore[no-untyped-call]
    node = {"intra_node_size": 1} if strategy is ShardingStrategy.HYBRID_SHARD else {}

    def work(backend: Backend) -> None:
        module, model = wrapped(backend, strategy=strategy, **node)
        for _ in range(2):
            call(module, batch(backend.rank)).square().mean().backward()  # type: ignore[no-untyped-call]
            check_at_rest(model)
            check_gradients(model, alone, backend.rank % model.groups[0].layout.world_size, atol=1e-5)
            model.zero_grad()

    run_ranks(2, work)


@CALLS
def test_they_compute_without_gradients(call: Callable[[Model, Tensor], Tensor]) -> None:
    alone = make()

    def work(backend: Backend) -> None:
        module, model = wrapped(backend)
        with torch.no_grad():
            torch.testing.assert_close(call(module, batch()), call(alone, batch()))
        check_at_rest(model)

    run_ranks(2, work)


def test_what_goes_in_and_comes_out_is_cast_as_of_the_model() -> None:
    def work(backend: Backend) -> None:
        module, _ = wrapped(backend, mixed_precision=MixedPrecision(torch.bfloat16, output_dtype=torch.float32))
        seen: list[torch.dtype] = []
        module.stem.register_forward_hook(lambda _, given, out: seen.extend((given[0].dtype, out.dtype)))
        assert module.stem(batch()).dtype == torch.float32
        module(batch())
        assert seen == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]

    run_ranks(2, work)


def test_one_that_fails_leaves_slices() -> None:
    def work(backend: Backend) -> None:
        module, model = wrapped(backend)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module.body(torch.ones(2, WIDTH + 1))
        check_at_rest(model)
        torch.testing.assert_close(module.body(batch()), _made.body(batch()))

    run_ranks(2, work)


def test_ranks_that_call_different_ones_are_told_so() -> None:
    def work(backend: Backend) -> None:
        module, _ = wrapped(backend)
        with pytest.raises(CollectiveMismatch):
            (module.stem if backend.rank else module.body.stack.layer(1))(batch())

    run_ranks(2, work)


def test_a_copy_of_one_is_refused() -> None:
    def work(backend: Backend) -> None:
        module, _ = wrapped(backend)
        with pytest.raises(StateError, match="a copy of a sharded module has only slices"):
            copy.deepcopy(module.stem)(batch())

    run_ranks(1, work)


def test_unwrapped_they_are_plain_modules() -> None:
    def work(backend: Backend) -> None:
        module, model = wrapped(backend)
        model.unwrap()
        assert not module.stem._forward_hooks
        assert not module.stem._forward_pre_hooks
        if backend.rank:
            module.stem(batch())

    run_ranks(2, work)


def test_an_encoder_that_generating_calls_alone(hf: ModuleType) -> None:
    expected = hf.generate(hf.make_t5().eval())

    def work(backend: Backend) -> None:
        model = FSDP(hf.make_t5().eval(), backend, units=lambda _, module: type(module).__name__ == "T5Block")
        assert hf.generate(model.module) == expected
        check_at_rest(model)

    run_ranks(2, work)
