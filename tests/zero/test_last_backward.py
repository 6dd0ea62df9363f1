"""Reductions that start during backward give the same bits as later ones, whichever gradients the ranks' backwards leave out."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import Place, make_model
from tests.zero.training import OPTIMIZERS, groups_of, parameters_of

Tensor = torch.Tensor
State = dict[str, Tensor]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def around(optimizer: ZeroOptimizer, early: bool) -> AbstractContextManager[None]:
    return optimizer.last_backward() if early else nullcontext()


def check_equal(states: list[State], expected: list[State]) -> None:
    for state, other in zip(states, expected, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in state.items())
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def train(world_size: int, early: bool, kind: str = "adamw", *, micro_batches: int = 1, clip: bool = False, **choices: Any) -> list[State]:
    def work(backend: Backend) -> State:
        model = make_gpt()
        optimizer_class, options = OPTIMIZERS[kind]
        optimizer = ZeroOptimizer(groups_of(model), optimizer_class, backend, module=model, units=[Block], **options, **choices)
        for batch in token_batches(4, 2 * world_size * micro_batches):
            *parts, last = batch.chunk(world_size)[backend.rank].chunk(micro_batches)
            for part in parts:
                backward(loss_of(model, part))
            with around(optimizer, early):
                backward(loss_of(model, last))
            if clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return parameters_of(model)

    return run_ranks(world_size, work)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_bit_changes(world_size: int, kind: str) -> None:
    check_equal(train(world_size, True, kind), train(world_size, False, kind))


@pytest.mark.parametrize(
    "choices", [{"micro_batches": 3}, {"clip": True}, {"bucket_bytes": 1}, {"bucket_bytes": 5000}, {"split": "parameters"}]
)
def test_no_choice_changes_a_bit(choices: dict[str, Any]) -> None:
    check_equal(train(2, True, **choices), train(2, False, **choices))


# --- when reductions start


def started_in_backward(freeze: Callable[[nn.Sequential], None] = lambda model: None) -> list[list[str]]:
    """What happens on each rank within `last_backward`, in order: buckets that are reduced, and the first layer's gradient."""

    def work(backend: Backend) -> list[str]:
        model = make_model()
        freeze(model)
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=[nn.Linear], lr=0.1)
        happened: list[str] = []
        for _, bucket in optimizer._sharded.buckets:
            start = bucket.start_reduction

            def note(start: Any = start, label: str = bucket.label) -> Any:
                happened.append(label)
                return start()

            bucket.start_reduction = note  # type: ignore[method-assign]
        first = model[0].weight
        assert isinstance(first, nn.Parameter)
        if first.requires_grad:
            first.register_hook(lambda _: happened.append("gradient"))  # type: ignore[no-untyped-call]
        with optimizer.last_backward():
            backward(Place(backend).loss(model, 0))
            happened.append("ended")
        before = list(happened)
        optimizer.step()
        optimizer.wait()
        assert happened == before
        assert optimizer.memory.full_gradients.current_bytes == 0
        return happened

    return run_ranks(2, work)


def test_reductions_start_as_buckets_are_complete() -> None:
    labels = [f"{index} (from {index}.weight)" for index in (4, 2, 0)]
    for happened in started_in_backward():
        assert happened[:3] == [*labels[:2], "gradient"]
        assert happened.count(labels[2]) == 1  # in backward or after it, depending on when the first reduction ends


def test_what_was_frozen_before_holds_nothing_up() -> None:
    def freeze(model: nn.Sequential) -> None:
        model[2].requires_grad_(False)
        model[4].get_parameter("bias").requires_grad_(False)

    for happened in started_in_backward(freeze):
        assert happened == ["4 (from 4.weight)", "gradient", "0 (from 0.weight)", "ended"]


def test_no_more_is_packed_at_once_than_in_step() -> None:
    limit = 5000

    def work(backend: Backend) -> int:
        model = make_gpt()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, bucket_bytes=limit, lr=0.1)
        with optimizer.last_backward():
            backward(loss_of(model, token_batches(1, 1)[0]))
        return optimizer.memory.full_gradients.peak_bytes

    largest = max(parameter.nbytes for parameter in make_gpt().parameters())
    assert all(0 < packed <= 2 * max(largest, limit) for packed in run_ranks(2, work))


# --- ranks whose backwards differ


Backward = Callable[[nn.Sequential, Backend], None]


def no_backward_on_rank_1(model: nn.Sequential, backend: Backend) -> None:
    if backend.rank == 0:
        backward(Place(backend).loss(model, 0))


def last_layer_is_unused_on_rank_1(model: nn.Sequential, backend: Backend) -> None:
    x = torch.ones(2, 5)
    backward((model if backend.rank == 0 else model[:3])(x).square().sum())


def a_layer_frozen_later_on_rank_1(model: nn.Sequential, backend: Backend) -> None:
    model[2].requires_grad_(backend.rank == 0)
    backward(Place(backend).loss(model, 0))


def two_backwards_on_rank_1(model: nn.Sequential, backend: Backend) -> None:
    for step in range(1 + backend.rank):
        backward(Place(backend).loss(model, step))


def a_gradient_edited_on_rank_1(model: nn.Sequential, backend: Backend) -> None:
    backward(Place(backend).loss(model, 0))
    gradient = model[4].get_parameter("weight").grad
    assert gradient is not None
    gradient.mul_(1 + backend.rank)


def gradients_dropped_everywhere(model: nn.Sequential, backend: Backend) -> None:
    backward(Place(backend).loss(model, 0))
    model[4].zero_grad()


@pytest.mark.parametrize(
    "run",
    [
        no_backward_on_rank_1,
        last_layer_is_unused_on_rank_1,
        a_layer_frozen_later_on_rank_1,
        two_backwards_on_rank_1,
        a_gradient_edited_on_rank_1,
        gradients_dropped_everywhere,
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_differ(run: Backward, world_size: int) -> None:
    def train(early: bool) -> list[State]:
        def work(backend: Backend) -> State:
            model = make_model()
            optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend, module=model, units=[nn.Linear], lr=0.1)
            for _ in range(3):
                with around(optimizer, early):
                    run(model, backend)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            return parameters_of(model)

        return run_ranks(world_size, work)

    check_equal(train(True), train(False))


def test_gradients_that_are_averaged_already_are_taken() -> None:
    def work(backend: Backend) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = ZeroOptimizer([weight], optim.SGD, backend, reduce_gradients=False, lr=1.0)
        with optimizer.last_backward():
            backward(-weight.sum())
        optimizer.step()
        return weight.tolist()

    assert run_ranks(2, work) == [[1.0] * 4] * 2


# --- errors


def test_changes_after_it_are_refused_and_zero_grad_begins_anew() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, lr=0.1)
        with optimizer.last_backward():
            backward(Place(backend).loss(model, 0))
        with pytest.raises(StateError, match="averaged already"), optimizer.last_backward():
            pass
        backward(Place(backend).loss(model, 1))
        with pytest.raises(StateError, match="gradients changed after clip_grad_norm_"):
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.last_backward():
            with pytest.raises(StateError, match="called within"):
                optimizer.step()
            backward(Place(backend).loss(model, 0))
        optimizer.step()
        optimizer.wait()

    run_ranks(2, work)


def test_a_backward_that_raises_everywhere_leaves_all_as_it_was() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ArithmeticError("planted")

    def work(backend: Backend) -> State:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=[nn.Linear], lr=0.1)
        x = torch.ones(2, 5)
        loss = model[3:](Broken.apply(model[:3](x))).sum()
        with pytest.raises(ArithmeticError), optimizer.last_backward():
            backward(loss)
        assert all(piece.grad is None for piece in optimizer._sharded.pieces.values())
        assert optimizer.memory.full_gradients.current_bytes == 0
        optimizer.zero_grad()
        with optimizer.last_backward():
            backward(Place(backend).loss(model, 0))
        optimizer.step()
        optimizer.wait()
        return parameters_of(model)

    plain = make_model()
    alone = optim.SGD(plain.parameters(), lr=0.1)
    backward(Place().loss(plain, 0))
    alone.step()
    for state in run_ranks(2, work):
        torch.testing.assert_close(state, parameters_of(plain), rtol=0, atol=1e-6)
