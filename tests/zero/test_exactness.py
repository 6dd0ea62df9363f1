"""Given equal gradients, the sharded optimizer computes the same bits as the optimizer that it wraps, whatever its class."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.zero import Split, ZeroOptimizer
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
STEPS = 4
SHAPES: list[tuple[int, ...]] = [(7, 5), (3,), (2, 3, 2), (), (1,), (0,), (1003,), (11,)]  # long enough for SIMD, and with odd ends
MATRICES: list[tuple[int, ...]] = [(7, 5), (3, 4), (1, 1), (6, 2)]
ELEMENT_WISE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": torch.tensor(0.1), "foreach": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "foreach": True}),
    (optim.AdamW, {"lr": 0.01, "maximize": True}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
]
BY_PARAMETER: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [(optim.Muon, {"lr": 0.02}), (optim.Adafactor, {"lr": 0.02})]


class NormScaled(optim.Optimizer):
    """A class that shardnet does not know: like LARS, it divides a gradient by the norm of the whole parameter's gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1), alpha=group["lr"])


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(of: list[nn.Parameter], step: int) -> None:
    """The last parameter has no gradient in the first two steps."""
    generator = torch.Generator().manual_seed(step)
    for parameter in of:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    if step < 2:
        of[-1].grad = None


def check(optimizer_class: type[optim.Optimizer], options: dict[str, Any], shapes: list[tuple[int, ...]], world_size: int) -> None:
    alone = parameters(shapes)
    whole = optimizer_class(alone, **options)
    for step in range(STEPS):
        set_gradients(alone, step)
        whole.step()

    def work(backend: Backend) -> None:
        held = parameters(shapes)
        optimizer = ZeroOptimizer(held, optimizer_class, backend, reduce_gradients=False, bucket_bytes=60, **options)
        for step in range(STEPS):
            set_gradients(held, step)
            optimizer.step()
        assert all(torch.equal(mine, reference) for mine, reference in zip(held, alone, strict=True))
        state, expected = optimizer.consolidated_state_dict(), whole.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        empty = {index for index, shape in enumerate(shapes) if not torch.Size(shape).numel()}
        assert list(state["state"]) == [index for index in expected["state"] if index not in empty]
        for index, entries in state["state"].items():
            torch.testing.assert_close(entries, expected["state"][index], rtol=0, atol=0)

    run_ranks(world_size, work)


@pytest.mark.parametrize(("optimizer_class", "options"), ELEMENT_WISE)
def test_element_wise_classes(optimizer_class: type[optim.Optimizer], options: dict[str, Any]) -> None:
    check(optimizer_class, options, SHAPES, 3)


@pytest.mark.parametrize(("optimizer_class", "options"), BY_PARAMETER)
@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_classes_that_look_at_whole_parameters(optimizer_class: type[optim.Optimizer], options: dict[str, Any], world_size: int) -> None:
    check(optimizer_class, options, MATRICES, world_size)


def test_an_unknown_class_gets_whole_parameters() -> None:
    check(NormScaled, {"lr": 0.3}, SHAPES, 2)


def test_an_unknown_class_may_be_split_by_elements_on_request() -> None:
    class Plain(optim.SGD):
        pass

    def work(backend: Backend) -> None:
        optimizers = [ZeroOptimizer(parameters([(4,)]), Plain, backend, split=split) for split in (None, Split.ELEMENTS, "elements")]
        assert [optimizer.split for optimizer in optimizers] == [Split.PARAMETERS, Split.ELEMENTS, Split.ELEMENTS]

    run_ranks(2, work)


def test_whole_parameters_are_balanced_over_groups() -> None:
    """Also if each group has only one parameter, and if groups are added later."""

    def work(backend: Backend) -> int:
        *first, last, very_last = parameters([(4, 4)] * 8)
        optimizer = ZeroOptimizer([{"params": [each]} for each in first], optim.Muon, backend)
        for each in (last, very_last):
            optimizer.add_param_group({"params": [each]})
        return sum(piece.numel() for piece in optimizer._sharded.pieces.values())

    assert run_ranks(4, work) == [32, 32, 32, 32]


def test_one_bucket_serves_several_groups() -> None:
    def work(backend: Backend) -> int:
        optimizer = ZeroOptimizer([{"params": [each]} for each in parameters(SHAPES)], optim.SGD, backend)
        return len(optimizer._sharded.buckets)

    assert run_ranks(2, work) == [1, 1]


@pytest.mark.parametrize(
    ("optimizer_class", "choices", "message"),
    [
        (optim.LBFGS, {}, "LBFGS cannot be sharded: its line search"),
        (optim.SparseAdam, {}, "use Adam"),
        (optim.SGD, {"split": "rows"}, "elements, parameters"),
        (nn.Linear, {}, "optimizer_class must be"),
        (optim.SGD, {"bucket_bytes": 0}, "bucket_bytes"),
        (optim.SGD, {"units": [nn.Linear]}, "no module was given"),
    ],
)
def test_what_cannot_be_is_refused(optimizer_class: Any, choices: dict[str, Any], message: str) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=message):
            ZeroOptimizer(parameters([(4,)]), optimizer_class, backend, **choices)

    run_ranks(1, work)


def test_the_wrapped_class_checks_its_own_options() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(ValueError, match="Invalid learning rate"):
            ZeroOptimizer(parameters([(4,)]), optim.AdamW, backend, lr=-1.0)
        with pytest.raises(TypeError, match="speed"):
            ZeroOptimizer(parameters([(4,)]), optim.AdamW, backend, speed=1.0)
        with pytest.raises(ValueError, match="empty parameter list"):
            ZeroOptimizer([], optim.AdamW, backend)

    run_ranks(1, work)
