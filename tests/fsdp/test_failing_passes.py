"""Errors in the middle of forward or backward: nothing stays gathered, and the model trains on. Also calls that are refused."""

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from tests.fsdp.parity import check_against_one_process, check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, data, seeded, square_loss

Tensor = torch.Tensor


class Failing(Stack):
    fail_in_forward = False
    fail_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.fail_in_forward:
                raise ArithmeticError("forward failed")
            if index == 1 and self.fail_in_backward:
                x.register_hook(_raise)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x)
        return out


def _raise(_: Tensor) -> None:
    raise ArithmeticError("backward failed")


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_forward_that_raises_leaves_nothing_gathered(prefetch: int) -> None:
    def train(model: FSDP, rank: int) -> None:
        inner = model.module
        assert isinstance(inner, Failing)
        inner.fail_in_forward = True
        with pytest.raises(ArithmeticError, match="forward failed"):
            model(data(rank))
        check_at_rest(model)
        inner.fail_in_forward = False
        square_loss(model, rank).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Failing), square_loss, units=[Layer], train=train, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_backward_that_raises_is_forgotten_at_the_next_forward(prefetch: int) -> None:
    def train(model: FSDP, rank: int) -> None:
        inner = model.module
        assert isinstance(inner, Failing)
        inner.fail_in_backward = True
        with pytest.raises(ArithmeticError, match="backward failed"):
            square_loss(model, rank).backward()  # type: ignore[no-untyped-call]
        inner.fail_in_backward = False
        model.zero_grad()
        square_loss(model, rank).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Failing), square_loss, units=[Layer], train=train, prefetch=prefetch)


def test_an_interrupted_forward_is_cleaned_up() -> None:
    def work(backend: Backend) -> None:
        inner = Stack()
        model = FSDP(inner, backend, units=[Layer])

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = inner.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(data(0))
        handle.remove()
        check_at_rest(model)
        model(data(0)).sum().backward()
        check_at_rest(model)

    run_ranks(1, work)


def test_reading_freed_parameters_raises_and_names_the_unit() -> None:
    class Keeping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.scale
            return super().forward(x)

    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(Keeping(), nn.Linear(WIDTH, 1)), backend, units=[Layer], prefetch=0)
        model(data(0))
        kept = model.module[0].__dict__["kept"]  # type: ignore[index]
        for use in (lambda: kept * 1, lambda: kept.sum(), lambda: data(0).mul(kept), kept.tolist):
            with pytest.raises(RuntimeError, match="the full parameters of 0 are freed"):
                use()

    run_ranks(2, work)


def test_double_backward_is_refused() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        x = data(0).requires_grad_()
        with pytest.raises(StateError, match="create_graph"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model(x).sum().backward()
        check_at_rest(model)

    run_ranks(1, work)
