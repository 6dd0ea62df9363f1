"""The run that the parity tests repeat in several ways: some AdamW steps of a small GPT."""

from dataclasses import dataclass

import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, AsyncFSDP
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
STEPS = 20
SAMPLES = 12  # divisible by every world size below, so that the mean over ranks is the mean over samples


@dataclass
class Run:
    losses: list[float]  # of the combined batch
    state: dict[str, Tensor]


def optimizer_for(parameters: object, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]
    return torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]


def train_alone(*, steps: int = STEPS, optimizer_kind: str = "adamw") -> Run:
    model = make_gpt()
    optimizer = optimizer_for(model.parameters(), optimizer_kind)
    losses = []
    for batch in token_batches(steps, SAMPLES):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, model.state_dict())


async def train_async(backend: Backend, *, steps: int = STEPS) -> dict[str, Tensor]:
    """One rank's part of the run, as an async program; returns the parameters at the end."""
    share = SAMPLES // backend.world_size
    async with AsyncFSDP(make_gpt(seed=backend.rank), backend, units=[Block]) as model:
        optimizer = optimizer_for(model.parameters())
        for batch in token_batches(steps, SAMPLES):
            loss = await model.run(loss_of, model.fsdp, batch[backend.rank * share :][:share])
            await model.backward(loss)
            await model.step(optimizer)
            optimizer.zero_grad()
        return await model.full_state_dict()


def train_sharded(
    world_size: int, *, steps: int = STEPS, prefetch: int = 1, explicit: bool = False, optimizer_first: bool = False
) -> list[Run]:
    def work(backend: Backend) -> Run:
        inner = make_gpt(seed=backend.rank)  # only rank 0's values count
        before = optimizer_for(inner.parameters()) if optimizer_first else None
        model = FSDP(inner, backend, units=[Block], prefetch=prefetch)
        optimizer = before or optimizer_for(model.parameters())
        share = SAMPLES // world_size
        losses = []
        for batch in token_batches(steps, SAMPLES):
            loss = loss_of(model, batch[backend.rank * share :][:share])
            loss.backward()  # type: ignore[no-untyped-call]
            if explicit:
                model.prefetch_forward_params()  # and then a step: it must not be lost
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses, model.full_state_dict())

    runs = run_ranks(world_size, work)
    combined = [sum(losses) / world_size for losses in zip(*(run.losses for run in runs), strict=True)]
    return [Run(combined, run.state) for run in runs]
