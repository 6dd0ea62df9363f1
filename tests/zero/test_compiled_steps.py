"""torch.compile of steps and models whose optimizer is sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.zero import ZeroOptimizer
from tests.compiling import Graphs
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import WIDTH, make_model

Tensor = torch.Tensor
STEPS = 3
pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo itself reads it
]


@pytest.mark.parametrize("compile_what", ["step", "model"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["all at once", "by units"])
def test_what_is_compiled_trains_as_without(compile_what: str, overlaps: bool) -> None:
    def train(backend: Backend, model: nn.Sequential, compiler: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
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

    def work(backend: Backend) -> None:
        without = train(backend, make_model(), lambda plain: plain)
        assert train(backend, make_model(), lambda plain: torch.compile(plain, backend=graphs)) == without

    graphs = Graphs()
    run_ranks(2, work)
    assert graphs.calls
    assert not graphs.traced
