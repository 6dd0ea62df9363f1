"""What is kept of what each rank has whole."""

import asyncio
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from shardnet import AsyncFSDP
from shardnet.backend.base import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import GradScaler
from shardnet.state import Inventory
from shardnet.testing import local_cluster
from shardnet.zero import ZeroOptimizer

Tensor = torch.Tensor


def counting(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Knows numbers of each parameter that are none of torch's, and something that is nothing."""

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            state = optimizer.state[parameter]
            state.update(steps=state.get("steps", 0) + 1, rate=0.1, done=True, nothing=None)

    optimizer = torch.optim.SGD(parameters, lr)
    optimizer.register_step_post_hook(count)
    return optimizer


class Whole(nn.Module):
    """With a layer that is not sharded, and buffers that are made by what is computed."""

    first: Tensor | None
    recent: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("first", None)
        self.register_buffer("recent", torch.zeros(0))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mean = x.detach().mean()[None]
        self.first = mean if self.first is None else self.first
        self.recent = torch.cat([self.recent, mean])
        if not hasattr(self, "late"):
            self.register_buffer("late", mean.clone())
        out: Tensor = self.layer(self.sharded(x)) + self.first
        return out

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "by": ["tensor", torch.tensor(self.calls)]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["by"][1].item() == state["calls"]
        self.calls = state["calls"]


class Run:
    """A training of it on one rank."""

    def __init__(self, model: AsyncFSDP, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inventory = Inventory([model, optimizer])

    async def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            await self.model.backward((await self.model(x)).square().mean())
            await self.model.step(self.optimizer)
            self.optimizer.zero_grad()

    def kept(self) -> tuple[Any, ...]:
        pieces = {piece.span.name: piece for piece, _ in self.inventory.pieces()}
        return copy.deepcopy((pieces, self.inventory.rest(), self.inventory.shared()))


@pytest.mark.parametrize("make", [torch.optim.AdamW, counting])
async def test_what_every_rank_has_whole_goes_on_where_it_was(make: Callable[..., torch.optim.Optimizer]) -> None:
    runs: list[tuple[Whole, dict[str, Any], dict[str, Tensor]]] = []
    async with local_cluster(1) as (backend,):
        for _ in range(2):
            torch.manual_seed(1)
            module = Whole()
            async with AsyncFSDP(module, backend, ignored_modules=[module.layer]) as model:
                run = Run(model, make(model.parameters(), lr=0.1))
                if not runs:
                    await run.steps(0, 2)
                    kept = run.kept()
                    await run.steps(2, 4)
                else:
                    run.inventory.load(*kept)
                    assert module.calls == 2
                    await run.steps(2, 4)
                runs.append((module, run.optimizer.state[module.layer.weight], run.inventory.rest()[0]))
    (one, state, rest), (other, state_there, rest_there) = runs
    assert (one.calls, len(one.recent)) == (other.calls, len(other.recent)) == (4, 4)
    assert {key: type(value) for key, value in state.items()} == {key: type(value) for key, value in state_there.items()}
    assert rest.keys() == rest_there.keys()
    assert {"first", "recent", "late", "layer.weight"} < rest.keys()
    for name, tensor in rest.items():
        assert torch.equal(tensor, rest_there[name]), name


async def test_a_buffer_is_made_where_its_module_is() -> None:
    """The device "meta" stands in for a GPU."""
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("seen", None)
    Inventory([module]).load({}, [{"seen": torch.ones(1)}], [None])
    assert module.seen is not None
    assert module.seen.device.type == "meta"


async def test_what_is_no_buffer_has_its_shape() -> None:
    async with local_cluster(1) as (backend,):
        module = Whole()
        async with AsyncFSDP(module, backend, ignored_modules=[module.layer]) as model:
            inventory = Inventory([model])
            pieces = {piece.span.name: piece for piece, _ in inventory.pieces()}
            for name in ("layer.weight", "layer.in_features", "nowhere.weight"):
                with pytest.raises(
                    UsageError, match=rf"{name} had shape \[7\] before, and is no buffer of that shape now: build the model alike"
                ):
                    inventory.load(pieces, [{name: torch.zeros(7)}], [None])
            with pytest.raises(UsageError, match="head had a get_extra_state"):
                inventory.load(pieces, [{}], [{"head": 1}])


async def test_what_cannot_be_kept_is_named() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {1, 2}

    async with local_cluster(1) as (backend,):
        odd = Odd(3, 3)
        async with AsyncFSDP(nn.Sequential(nn.Linear(3, 3), odd), backend, ignored_modules=[odd]) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            inventory = Inventory([model, optimizer])
            with pytest.raises(UsageError, match=r"get_extra_state\(\) of 1: a value of type set cannot be kept"):
                inventory.shared()
            optimizer.state[odd.weight] = {"history": [1]}
            with pytest.raises(UsageError, match=r"what SGD knows of 1\.weight cannot be kept: its history is a list"):
                inventory.rest()


async def test_of_an_optimizer_and_a_scheduler_the_class_counts() -> None:
    """Another one would take the state, and go wrong later."""
    async with local_cluster(1) as (backend,), AsyncFSDP(nn.Linear(1, 1), backend) as model:

        def kept(make: Callable[..., torch.optim.Optimizer], schedule: Callable[..., LRScheduler]) -> Inventory:
            optimizer = make(model.parameters(), lr=0.1)
            return Inventory([model, optimizer, schedule(optimizer, 5), GradScaler(backend)])

        now = kept(torch.optim.SGD, StepLR)
        now.check_kinds(kept(torch.optim.SGD, StepLR).kinds, "before")
        for other, named in (
            (kept(torch.optim.AdamW, StepLR), "options of AdamW, state of StepLR"),
            (kept(torch.optim.SGD, CosineAnnealingLR), "options of SGD, state of CosineAnnealingLR"),
        ):
            with pytest.raises(UsageError) as refused:
                now.check_kinds(other.kinds, "before")
            assert str(refused.value) == (
                f"other things were given before (model, {named}, state) than now (model, options of SGD, state of StepLR, state): "
                "give the same in the same order"
            )

        def zero(make: type[torch.optim.Optimizer]) -> list[str]:
            return Inventory([ZeroOptimizer(nn.Linear(1, 1).parameters(), make, backend, lr=0.1)]).kinds

        assert await asyncio.to_thread(zero, torch.optim.Adam) == ["ZeroOptimizer of Adam", "options of ZeroOptimizer"]


async def test_an_optimizer_is_not_kept_without_what_else_its_module_has() -> None:
    def check(backend: Backend) -> None:
        for module, lost in (
            (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1.running_mean"),
            (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "1.weight"),
        ):
            parameters = [parameter for name, parameter in module.named_parameters() if name != lost]
            optimizer = ZeroOptimizer(parameters, torch.optim.SGD, backend, module=module, lr=0.1)
            with pytest.raises(
                UsageError, match=rf"a ZeroOptimizer is to be kept without its module, whose {lost} it does not step: give the"
            ):
                Inventory([optimizer])
            Inventory([optimizer, module])
            Inventory([nn.ModuleDict({"inner": module}), optimizer])
        plain = nn.Linear(2, 2)
        plain.register_buffer("anew", torch.ones(1), persistent=False)
        Inventory([ZeroOptimizer(plain.parameters(), torch.optim.SGD, backend, module=plain, lr=0.1)])

    async with local_cluster(1) as (backend,):
        await asyncio.to_thread(check, backend)
