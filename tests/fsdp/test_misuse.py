"""What is done to a sharded model, or with it, that would go wrong in silence."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, stack_of


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def new_head(stack: Stack) -> str:
    stack.head = nn.Linear(WIDTH, 2)
    return r"head\.weight"


def new_parameter(stack: Stack) -> str:
    stack.layer(1).scale = nn.Parameter(torch.ones(WIDTH))
    return r"layers\.1\.scale"


def adapter(stack: Stack) -> str:
    stack.layer(2).linear.adapter = nn.Linear(WIDTH, 1)
    return r"layers\.2\.linear\.adapter\.weight"


@pytest.mark.parametrize("change", [new_head, new_parameter, adapter])
@pytest.mark.parametrize("use", [lambda model: model(batch()), FSDP.full_state_dict, FSDP.sharded_state_dict])
def test_parameters_that_came_later_are_refused(change: Callable[[Stack], str], use: Callable[[FSDP], object]) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        model(batch()).sum().backward()
        name = change(stack_of(model))
        with pytest.raises(StateError, match=rf"^{name} was put into the model after it was sharded, .* shard it anew$"):
            use(model)

    run_ranks(2, work)


def test_what_came_later_without_new_parameters_is_not() -> None:
    def work(backend: Backend) -> None:
        stack, ignored = Stack(), nn.Linear(WIDTH, WIDTH)
        model = FSDP(nn.Sequential(stack, nn.Identity(), ignored), backend, units=[Layer], ignored_modules=[ignored])
        ignored.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))  # is its owner's
        model.module.register_module("1", nn.Dropout(0.0))
        stack.head.weight = stack.head.weight
        prune.identity(stack.layer(0).linear, "bias")  # type: ignore[no-untyped-call]  # the same parameter by another name
        stack.twice = stack.head
        model.full_state_dict()

    run_ranks(1, work)


def test_an_unwrapped_model_is_not_called_as_if_it_were_not() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        module = model.unwrap()
        with pytest.raises(StateError, match=r"this FSDP was unwrapped: the module that unwrap\(\) has returned is whole again"):
            model(batch())
        module(batch()).sum().backward()

    run_ranks(2, work)


def test_what_is_no_backend_is_told() -> None:
    with pytest.raises(UsageError, match=r"^backend must be a Backend, such as `cluster\.backend`, got a value of type Stack$"):
        FSDP(Stack(), Stack())  # type: ignore[arg-type]  # that is the misuse


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
async def test_optimizers_that_look_beyond_elements_are_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    (alone,) = LoopbackBackend.create_group(1)
    async with AsyncFSDP(Stack(), alone, units=[Layer]) as model:
        for step in (model.step, lambda optimizer: model.run(model.step_in_backward, optimizer)):
            with pytest.raises(UsageError, match=r"^(LBFGS|Adafactor) cannot step what is sharded, such as the parameters of "):
                await step(kind(model.parameters()))
    await alone.aclose()


async def test_names_of_the_model_inside_are_pointed_at_by_async_models() -> None:
    (alone,) = LoopbackBackend.create_group(1)
    async with AsyncFSDP(Stack(), alone, units=[Layer]) as model:
        for name, where in (("named_parameters", "fsdp"), ("unwrap", "fsdp"), ("head", r"fsdp\.module")):
            with pytest.raises(AttributeError, match=rf"has no attribute '{name}', but its \w+ has: use model\.{where}\.{name}, and what"):
                getattr(model, name)
        with pytest.raises(AttributeError, match="object has no attribute 'no_such'"):
            model.no_such  # noqa: B018
    await alone.aclose()
