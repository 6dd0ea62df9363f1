"""torch.compile of a sharded model's units, of the whole model, and of whole steps."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, GradScaler, MixedPrecision
from tests.compiling import Graphs
from tests.fsdp.parity import check_at_rest, check_gradients
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, seeded

Tensor = torch.Tensor
STEPS = 3
pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # which dynamo itself reads
]


def loss_of(model: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    return model(torch.linspace(-1, 1 + rank, 4 * WIDTH).reshape(4, WIDTH)).square().mean()


def trained_alone(world_size: int) -> nn.Module:
    alone = seeded(Stack)()
    torch.stack([loss_of(alone, rank) for rank in range(world_size)]).mean().backward()  # type: ignore[no-untyped-call]
    return alone


def compile_layers(model: nn.Module, graphs: Graphs) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.compile(backend=graphs)


def test_compiled_units_are_compiled_as_often_as_without_sharding() -> None:
    without, with_sharding = Graphs(), Graphs()
    whole = seeded(Stack)()
    compile_layers(whole, without)
    for _ in range(STEPS):
        loss_of(whole, 0).backward()  # type: ignore[no-untyped-call]
    assert without.calls
    torch.compiler.reset()

    def work(backend: Backend) -> None:
        stack = seeded(Stack)()
        compile_layers(stack, with_sharding)
        model = FSDP(stack, backend, units=[Layer])
        for _ in range(STEPS):
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            check_gradients(model, trained_alone(1), 0)
            check_at_rest(model)
            model.zero_grad()

    run_ranks(1, work)
    assert with_sharding.calls == without.calls


def test_the_hooks_of_its_parts_are_nothing_in_a_compiled_unit() -> None:
    """The whole model is one graph, as it is without sharding."""
    without, with_sharding = Graphs(), Graphs()
    whole = seeded(Stack)()
    whole.compile(backend=without)
    loss_of(whole, 0).backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()

    def work(backend: Backend) -> None:
        stack = seeded(Stack)()
        stack.compile(backend=with_sharding)
        model = FSDP(stack, backend)
        for _ in range(STEPS):
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]

    run_ranks(1, work)
    assert with_sharding.calls == without.calls


@pytest.mark.parametrize("compile_what", ["units", "all"])
def test_gradients_are_those_of_one_process(compile_what: str) -> None:
    alone = trained_alone(2)
    stacks = [seeded(Stack)() for _ in range(2)]
    graphs = Graphs()

    def work(backend: Backend) -> None:
        stack = stacks[backend.rank]
        if compile_what == "units":
            compile_layers(stack, graphs)
        model = FSDP(stack, backend, units=[Layer])
        called = torch.compile(model, backend=graphs) if compile_what == "all" else model
        for _ in range(STEPS):
            loss_of(called, backend.rank).backward()  # type: ignore[no-untyped-call]
            check_gradients(model, alone, backend.rank)
            check_at_rest(model)
            model.zero_grad()

    run_ranks(2, work)
    assert graphs.calls
    assert not graphs.traced


@pytest.mark.parametrize("how", ["clipped", "in backward", "scaled", "in bfloat16"])
def test_a_whole_step_may_be_compiled(how: str) -> None:
    """Hooks, reductions and the step's calls of FSDP are not part of its graphs."""

    def train(backend: Backend, stack: nn.Module, compiler: Callable[..., Callable[[], Tensor]]) -> list[Tensor]:
        precision = MixedPrecision(param_dtype=torch.bfloat16) if how == "in bfloat16" else None
        model = FSDP(stack, backend, units=[Layer], mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(backend, init_scale=4.0)
        if how == "in backward":
            model.step_in_backward(optimizer)

        def step() -> Tensor:
            loss = loss_of(model, backend.rank)
            (scaler.scale(loss) if how == "scaled" else loss).backward()  # type: ignore[no-untyped-call]
            if how == "clipped":
                model.clip_grad_norm_(0.1)
            if how == "scaled":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = compiler(step)
        return [run() for _ in range(STEPS)]

    stacks = [[seeded(Stack)() for _ in range(2)] for _ in range(2)]
    graphs = Graphs()

    def work(backend: Backend) -> None:
        plain, compiled = (pair[backend.rank] for pair in stacks)
        without = train(backend, plain, lambda step: step)
        assert train(backend, compiled, lambda step: torch.compile(step, backend=graphs)) == without

    run_ranks(2, work)
    assert graphs.calls
    assert not graphs.traced
