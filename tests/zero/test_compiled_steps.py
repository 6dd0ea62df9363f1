"""torch.compile of steps and models whose optimizer is sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.zero import ZeroOptimizer
from tests.compiling import compiled_as_plain
from tests.fsdp.conftest import START_S
from tests.fsdp.crew import crew
from tests.training.workers import Nursery
from tests.zero.alike import WIDTH, make_model

Tensor = torch.Tensor
STEPS = 3


def trains_as_without(backend: Backend, compile_what: str, overlaps: bool) -> tuple[int, list[str]]:
    """Compares losses with those of a plain model; the number of graphs, and our own lines in them."""

    def train(compiler: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        model = make_model()
        choices: dict[str, Any] = {"module": model, "units": [nn.Linear]} if overlaps else {}
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, lr=0.1, **choices)
        called = compiler(model) if compile_what == "model" else model

        def step(x: Tensor) -> Tensor:
            loss = called(x).square().mean()
            with optimizer.last_backward():
                loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = compiler(step) if compile_what == "step" else step
        batches = torch.linspace(-1, 1 + backend.rank, STEPS * 4 * WIDTH).reshape(STEPS, 4, WIDTH)
        return [*[run(x) for x in batches], model(batches[0]).mean().detach()]

    return compiled_as_plain(train)


@pytest.mark.timeout(2 * START_S)
def test_what_is_compiled_trains_as_without(nursery: Nursery) -> None:
    """All in one test, because of the processes' start."""
    with crew(nursery, 2) as processes:
        for compile_what in ("step", "model"):
            for overlaps in (False, True):
                for graphs, ours in processes.run(2, trains_as_without, compile_what, overlaps):
                    assert graphs > 0, (compile_what, overlaps)
                    assert not ours, (compile_what, overlaps)
