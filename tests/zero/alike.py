"""One training program, run in one process with the plain optimizer and on several ranks with the sharded one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.zero import ZeroOptimizer
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
SAMPLES = 6
WIDTH = 5


@dataclass
class Place:
    """Where a program runs: alone, or on one rank of several."""

    backend: Backend | None = None
    choices: dict[str, Any] | None = None

    def optimizer(self, model: nn.Module, params: Any, optimizer_class: Any, **options: Any) -> Any:
        """Typed as Any, since the programs use only what both classes have."""
        if self.backend is None:
            return optimizer_class(params, **options)
        choices = {"module": model, "units": [nn.Linear], "bucket_bytes": 64} if self.choices is None else self.choices
        return ZeroOptimizer(params, optimizer_class, self.backend, **choices, **options)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The mean over this place's share of the step's samples."""
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
        if self.backend is not None:
            x = x.chunk(self.backend.world_size)[self.backend.rank]
        loss: Tensor = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        return loss


Program = Callable[[nn.Sequential, Place], Any]


def make_model() -> nn.Sequential:
    """A model with the same parameters on all ranks."""
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def check_alike(program: Program, world_size: int = 2, **choices: Any) -> None:
    """The program ends with the same parameters, within rounding, and gives the same result, wherever it runs."""
    alone = make_model()
    expected = program(alone, Place())

    def work(backend: Backend) -> tuple[Any, dict[str, Tensor]]:
        model = make_model()
        result = program(model, Place(backend, choices or None))
        return result, {name: value.clone() for name, value in model.state_dict().items()}

    runs = run_ranks(world_size, work)
    for result, state in runs:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state, dict(alone.state_dict()), rtol=0, atol=1e-6)
        assert all(torch.equal(value, runs[0][1][name]) for name, value in state.items())
