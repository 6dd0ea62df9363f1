"""Training in bfloat16 over float32 parameters: with shardnet, with FSDP2, and in one process."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from shardnet.fsdp import MixedPrecision
from tests.fsdp.cases import Case, make_small, train_share
from tests.fsdp.training import Run

Tensor = torch.Tensor
POLICY = MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)


class Cast(nn.Module):
    """A model under POLICY in one process: its parameters are cast for each forward, and their gradients are cast back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        cast = {name: parameter.to(POLICY.param_dtype) for name, parameter in self.model.named_parameters()}
        out: Tensor = functional_call(self.model, cast, (tokens,)).to(POLICY.output_dtype)
        return out


def train_alone(optimizer: str) -> Run:
    """The whole batch at once."""
    model = make_small()
    losses = train_share(Cast(model), 0, Case(1, optimizer, 1), nullcontext)
    return Run(losses, model.state_dict())


class Deviation(NamedTuple):
    """How far one training ends from another."""

    loss: float  # the largest difference in any step
    parameters: float  # the distance between the two ends, as a share of the distance from the start


def deviation(run: Run, reference: Run) -> Deviation:
    start = make_small().state_dict()
    way = torch.cat([(value - start[name]).flatten() for name, value in reference.state.items()])
    apart = torch.cat([(run.state[name] - value).flatten() for name, value in reference.state.items()])
    losses = max(abs(ours - theirs) for ours, theirs in zip(run.losses, reference.losses, strict=True))
    return Deviation(losses, float(apart.norm() / way.norm()))


def largest(deviations: Iterable[Deviation]) -> Deviation:
    return Deviation(*map(max, zip(*deviations, strict=True)))
