"""The runs that the parity tests compare: a small GPT with two parameter groups, in one process and sharded."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
STEPS = 6
SAMPLES = 12  # divisible by every world size that is tested, so that the mean over ranks is the mean over samples
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


@dataclass
class Run:
    losses: list[float]  # of the combined batch
    parameters: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)  # consolidated


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; the others do not, and learn more slowly."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_alone(kind: str, *, steps: int = STEPS) -> Run:
    model = make_gpt()
    optimizer_class, options = OPTIMIZERS[kind]
    optimizer = optimizer_class(groups_of(model), **options)
    losses = [train_step(model, optimizer, batch) for batch in token_batches(steps, SAMPLES)]
    return Run(losses, parameters_of(model), optimizer.state_dict())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, micro_batches: int = 1, dtype: torch.dtype = torch.float32
) -> float:
    """`dtype` is what the model computes in; parameters and gradients are float32."""
    total = 0.0
    for part in batch.chunk(micro_batches):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = len(part) / len(batch) * loss_of(model, part)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train_rank(
    backend: Backend, kind: str, *, overlapping: bool = True, micro_batches: int = 1, dtype: torch.dtype = torch.float32, **choices: Any
) -> Run:
    """Train one rank. Ranks begin with different parameters, and rank 0's are used."""
    model = make_gpt(seed=backend.rank)
    optimizer_class, options = OPTIMIZERS[kind]
    if overlapping:
        choices.update(module=model, units=[Block])
    optimizer = ZeroOptimizer(groups_of(model), optimizer_class, backend, **options, **choices)
    share = SAMPLES // backend.world_size
    batches = [batch[backend.rank * share :][:share] for batch in token_batches(STEPS, SAMPLES)]
    losses = [train_step(model, optimizer, batch, micro_batches, dtype) for batch in batches]
    optimizer.wait()
    return Run(losses, parameters_of(model), optimizer.consolidated_state_dict())


def train_sharded(world_size: int, kind: str, **choices: Any) -> list[Run]:
    """One run for each rank, with the losses of the combined batch."""
    runs = run_ranks(world_size, lambda backend: train_rank(backend, kind, **choices))
    combined = [sum(losses) / world_size for losses in zip(*(run.losses for run in runs), strict=True)]
    return [Run(combined, run.parameters, run.state) for run in runs]
