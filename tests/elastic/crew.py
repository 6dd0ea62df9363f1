"""Members of an elastic job, all in this process, that die when a test says so."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardnet import AsyncFSDP, Cluster
from shardnet.config import Timeouts
from shardnet.elastic import State, run
from shardnet.loop import LoopThread
from shardnet.rendezvous.server import RendezvousServer
from shardnet.training import Departure

Tensor = torch.Tensor
WIDTH, SAMPLES = 33, 8
SETTLE_S = 0.3


Train = Callable[[Cluster, State, "Life"], Awaitable[Any]]


class Died(Exception):
    """Raised by a member that should die: it leaves without a goodbye."""


@dataclass
class Life:
    """What one member went through."""

    epochs: list[tuple[int, int, int, int]] = field(default_factory=list)  # epoch, rank, world size and step at its beginning
    states: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by step: the states that it saw after a commit or a resumption
    result: Any = None
    error: Exception | None = None
    departure: Departure = field(default_factory=lambda: Departure(lambda: None))  # how its program is told to leave
    left: bool = False  # because it was told to leave


class Crew:
    """A rendezvous and the members that meet there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lives: list[Life] = []
        self._tasks: list[asyncio.Task[None]] = []

    def hire(
        self,
        train: Train,
        *,
        least: int,
        most: int,
        node: str = "",
        every: int = 1,
        collective_s: float = 15.0,
        join_s: float = 20.0,
        elastic: bool = True,
        **settings: Any,
    ) -> Life:
        """Start a member; `wait` waits for its end."""
        life = Life()

        async def live() -> None:
            task = asyncio.current_task()
            assert task is not None
            life.departure = Departure(task.cancel)
            life.departure.become_current()
            try:
                life.result = await run(
                    lambda cluster, state: train(cluster, state, life),
                    every=every,
                    **settings,
                    rendezvous=self.address,
                    job="job",
                    elastic=elastic,
                    min_world_size=least,
                    max_world_size=most,
                    node=node,
                    timeouts=replace(Timeouts.for_tests(), collective_s=collective_s, join_s=join_s),
                )
            except Exception as error:  # noqa: BLE001 - the test looks at it
                life.error = error.with_traceback(None)
            except asyncio.CancelledError:
                if not life.departure.wanted:
                    raise
                life.left = True

        self.lives.append(life)
        self._tasks.append(asyncio.create_task(live()))
        return life

    async def wait(self) -> None:
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def crew() -> AsyncIterator[Crew]:
    loop = LoopThread.shared()
    server = RendezvousServer("127.0.0.1:0", settle_s=SETTLE_S, timeouts=Timeouts.for_tests())
    await loop.run_here(server.start())
    members = Crew(server.address)
    try:
        yield members
    finally:
        await members.stop()
        await loop.run_here(server.aclose())


def net(*, dropout: float = 0.0) -> nn.Module:
    """The same model on all ranks and in all epochs; no world size divides its parameters evenly."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def batch(step: int) -> Tensor:
    """The same batch on all ranks, so that the result does not depend on how many there are."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: Tensor, inputs: Tensor) -> Tensor:
    return F.mse_loss(outputs, inputs.sum(dim=1, keepdim=True) / 5)


def alone(steps: int) -> dict[str, Tensor]:
    """The parameters after training in one process."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        inputs = batch(step)
        torch.autograd.backward(loss_of(model(inputs), inputs))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


async def train_step(model: AsyncFSDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = batch(step)
    await model.backward(loss_of(await model(inputs), inputs))
    await model.step(optimizer)
    optimizer.zero_grad()


async def whole(model: AsyncFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state as one process would have them, copied; a collective."""
    found: dict[str, Any] = {name: value.clone() for name, value in (await model.full_state_dict()).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        for group in model.fsdp.groups:
            parts = [optimizer.state.get(each, {}).get(key, torch.zeros_like(each)) for each in group.originals]
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            found[f"{group.label} {key}"] = await group._comms.gathers.all_gather(flat, sizes=group.layout.sizes)
    steps = {float(state["step"]) for parameter, state in optimizer.state.items() if parameter.numel()}
    found["steps"] = steps
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name] for name, value in one.items()
    )
