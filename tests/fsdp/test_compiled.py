"""torch.compile of a sharded model's units, of the whole model, and of whole steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, GradScaler, MixedPrecision
from tests.compiling import Graphs, compiled_as_plain, nothing_compiled
from tests.fsdp.conftest import START_S
from tests.fsdp.crew import crew
from tests.fsdp.parity import check_at_rest, check_gradients
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, seeded
from tests.training.workers import Nursery

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


def gradients(backend: Backend, compile_what: str) -> tuple[int, list[str]]:
    """Compares this rank's gradients with those of one process; the number of graphs, and our own lines in them."""
    alone, stack, graphs = trained_alone(2), seeded(Stack)(), Graphs()
    with nothing_compiled():
        if compile_what == "units":
            compile_layers(stack, graphs)
        model = FSDP(stack, backend, units=[Layer])
        called = torch.compile(model, backend=graphs) if compile_what == "all" else model
        for _ in range(STEPS):
            loss_of(called, backend.rank).backward()  # type: ignore[no-untyped-call]
            check_gradients(model, alone, backend.rank)
            check_at_rest(model)
            model.zero_grad()
    return len(graphs.calls), graphs.traced


def whole_steps(backend: Backend, how: str) -> tuple[int, list[str]]:
    """Compares losses of compiled steps with those of plain ones; the number of graphs, and our own lines in them."""

    def train(compiler: Callable[..., Callable[[], Tensor]]) -> list[Tensor]:
        precision = MixedPrecision(param_dtype=torch.bfloat16) if how == "in bfloat16" else None
        model = FSDP(seeded(Stack)(), backend, units=[Layer], mixed_precision=precision)
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

    return compiled_as_plain(train)


@pytest.mark.timeout(2 * START_S)
def test_on_two_ranks_all_is_as_without_and_nothing_of_ours_is_in_a_graph(nursery: Nursery) -> None:
    """Hooks, reductions and the step's calls of FSDP are not part of its graphs. All in one test, because of the processes' start."""
    works: list[tuple[Callable[..., Any], str]] = [(gradients, what) for what in ("units", "all")]
    works += [(whole_steps, how) for how in ("clipped", "in backward", "scaled", "in bfloat16")]
    with crew(nursery, 2) as processes:
        for work, argument in works:
            for graphs, ours in processes.run(2, work, argument):
                assert graphs > 0, argument
                assert not ours, argument
