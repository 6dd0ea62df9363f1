"""What is kept of what each rank has whole."""

import asyncio
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from shardnet import AsyncFSDP
from shardnet.backend.base import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import GradScaler
from shardnet.state import Inventory
from shardnet.testing import each_rank, local_cluster
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
    Inventory([module]).load({}, [{**module.state_dict(), "seen": torch.ones(1)}], [None])
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
                    UsageError, match=rf"{name} had shape \[7\] before, which does not fit the model now; build the same model as before"
                ):
                    inventory.load(pieces, [{name: torch.zeros(7)}], [None])
            with pytest.raises(UsageError, match="head had a get_extra_state"):
                inventory.load(pieces, inventory.rest(), [{"head": 1}])


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
            with pytest.raises(
                UsageError, match=r"the state of SGD for 1\.weight must be tensors and numbers to be kept, but history is a list"
            ):
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
                "the things given now (model, options of SGD, state of StepLR, state) differ from those given before "
                f"(model, {named}, state); give the same things in the same order"
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
            with pytest.raises(UsageError, match=rf"ZeroOptimizer does not keep {lost} of its module, which it does not step; give the"):
                Inventory([optimizer])
            Inventory([optimizer, module])
            Inventory([nn.ModuleDict({"inner": module}), optimizer])
        plain = nn.Linear(2, 2)
        plain.register_buffer("anew", torch.ones(1), persistent=False)
        Inventory([ZeroOptimizer(plain.parameters(), torch.optim.SGD, backend, module=plain, lr=0.1)])

    async with local_cluster(1) as (backend,):
        await asyncio.to_thread(check, backend)


def linears(count: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


async def step(model: AsyncFSDP, optimizer: torch.optim.Optimizer) -> None:
    await model.backward((await model(torch.ones(2, 4))).square().mean())
    await model.step(optimizer)
    optimizer.zero_grad()


def kept(inventory: Inventory) -> tuple[Any, ...]:
    return copy.deepcopy(({piece.span.name: piece for piece, _ in inventory.pieces()}, inventory.rest(), inventory.shared()))


async def test_where_tensors_are_kept_does_not_depend_on_what_modules_hold_at_this_moment() -> None:
    """A checkpoint's manifest is made while the training goes on, and units are gathered."""

    async def work(backend: Backend) -> None:
        module = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.BatchNorm1d(4), checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
        module[3].weight = module[0].weight
        names = list(module.state_dict())
        async with AsyncFSDP(module, backend, ignored_modules=[module[2]]) as model:
            inventory = Inventory([model])
            (found,) = inventory.modules()
            assert [each.name for each in found] == names
            for each in found:
                path = each.name if each.name.startswith(("1", "3")) else each.name.replace(".", "._checkpoint_wrapped_module.")
                if each.name.startswith("2") or "running" in each.name or "num_batches" in each.name:
                    assert (each.spread, each.own) == (None, path)
                else:
                    path = path.replace("3.weight", "0._checkpoint_wrapped_module.weight")  # tied
                    assert each.spread is not None
                    assert (each.spread.name, each.own) == (f"0/{path}", None)
            sizes, rest = inventory.sizes(), inventory.rest()[0].keys()

            def check() -> None:
                with model.fsdp.summon_full_params():
                    assert inventory.modules() == [found]
                    assert (inventory.sizes(), inventory.rest()[0].keys()) == (sizes, rest)

            await model.run(check)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)


async def test_what_a_hook_computes_is_kept_nowhere() -> None:
    def compute(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}twice"] = state[f"{prefix}weight"] * 2
        state[f"{prefix}bias"] = state[f"{prefix}bias"].clone()

    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(compute)  # type: ignore[no-untyped-call]  # torch has no annotation for it
    (found,) = Inventory([module]).modules()
    assert found == [("weight", None, "weight"), ("bias", None, "bias"), ("twice", None, None)]


async def test_parameters_that_an_optimizer_gets_later_have_a_state() -> None:
    """As in gradual unfreezing."""
    async with local_cluster(1) as (backend,):
        module = linears(3)
        async with AsyncFSDP(module, backend, ignored_modules=[module[1]]) as model:
            optimizer = torch.optim.AdamW(module[2].parameters(), lr=0.1)
            inventory = Inventory([model, optimizer])
            await step(model, optimizer)
            optimizer.add_param_group({"params": [*module[0].parameters(), *module[1].parameters()]})
            await step(model, optimizer)
            pieces, rest, shared = kept(inventory)
            assert all({"step", "exp_avg", "exp_avg_sq"} < piece.state.keys() for piece in pieces.values())
            assert {"1.weight: exp_avg", "1.bias: step"} < rest[0].keys()
            steps = {name: optimizer.state[parameter]["step"].item() for name, parameter in module.named_parameters()}
            optimizer.state.clear()
            inventory.load(pieces, rest, shared)
            assert steps == {name: optimizer.state[parameter]["step"].item() for name, parameter in module.named_parameters()}
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            with pytest.raises(UsageError, match="AdamW has parameters that are in none of the sharded models given here"):
                inventory.shared()


async def test_parameters_that_a_zero_optimizer_gets_later_are_its_own() -> None:
    def check(backend: Backend) -> None:
        module = linears(2)
        optimizer = ZeroOptimizer(module[1].parameters(), torch.optim.AdamW, backend, module=module, lr=0.1)
        inventory = Inventory([module, optimizer])
        assert inventory.rest()[0].keys() == {"0.weight", "0.bias"}
        optimizer.add_param_group({"params": list(module[0].parameters())})
        assert inventory.rest()[0].keys() == set()
        assert inventory.sizes().keys() == {f"1/{name}" for name, _ in module.named_parameters()}

    async with local_cluster(1) as (backend,):
        await asyncio.to_thread(check, backend)


async def test_a_module_may_have_a_colon_in_its_name() -> None:
    class Heads(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.values()]).mean(0)

    async with local_cluster(1) as (backend,):
        runs: list[tuple[Any, ...]] = []
        for _ in range(2):
            module = Heads({"task: a": nn.Sequential(nn.BatchNorm1d(4)), "task": nn.Linear(4, 4), "task: b": nn.Linear(4, 4)})
            async with AsyncFSDP(module, backend, ignored_modules=[module["task"], module["task: b"]]) as model:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                inventory = Inventory([model, optimizer])
                if not runs:
                    await step(model, optimizer)
                else:
                    inventory.load(*runs[0])
                    assert optimizer.state[module.get_parameter("task: b.weight")]["step"].item() == 1
                runs.append(kept(inventory))
        (_, (rest, _), _), (_, (rest_there, _), _) = runs
        assert "task: b.weight: exp_avg" in rest
        assert all(torch.equal(tensor, rest_there[name]) for name, tensor in rest.items())
        assert rest.keys() == rest_there.keys()


@pytest.mark.parametrize(
    ("average", "sizes", "why"),
    [
        (linears(3), (4,), r"no state was kept for the parameter 2\.weight of shape \[4, 4\]; build the same model"),
        (linears(1), (4,), r"1\.weight had shape \[4, 4\] before, which does not fit the model now"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (4,), r"1\.weight had shape \[4, 4\] before, which does not fit the model now"),
        (linears(2), (2, 2), "SGD had 1 parameter groups when its state was kept, but has 2 now; give it the same groups"),
    ],
)
async def test_what_does_not_fit_changes_nothing(average: nn.Module, sizes: tuple[int, ...], why: str) -> None:
    async with local_cluster(1) as (backend,):
        async with AsyncFSDP(linears(2), backend) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            await step(model, optimizer)
            state = kept(Inventory([model, optimizer, linears(2)]))
        async with AsyncFSDP(linears(2), backend) as model:
            parameters = list(model.parameters())
            optimizer = torch.optim.SGD(
                [{"params": parameters[sum(sizes[:at]) : sum(sizes[: at + 1])]} for at in range(len(sizes))], lr=0.1, momentum=0.9
            )
            inventory = Inventory([model, optimizer, average])
            before = kept(inventory)
            with pytest.raises(UsageError, match=why):
                inventory.load(*state)
            (pieces, rest, shared), (pieces_before, rest_before, shared_before) = kept(inventory), before
            assert all(torch.equal(piece.state["parameter"], pieces_before[name].state["parameter"]) for name, piece in pieces.items())
            assert all(torch.equal(tensor, rest_before[2][name]) for name, tensor in rest[2].items())
            assert shared == shared_before
            assert not optimizer.state


async def test_an_optimizer_may_leave_empty_slices_out() -> None:
    """Then each rank's groups have their own number of parameters, and another one in another world."""
    made = list[tuple[Any, Any, Any]]()

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(nn.Linear(4, 1), backend) as model:
            optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.numel()])
            await step(model, optimizer)
            inventory = Inventory([model, optimizer])
            if made:
                inventory.check(*made[0][1:])
            elif backend.rank == 0:
                made.append(kept(inventory))

    for ranks in (1, 2):
        async with local_cluster(ranks) as world:
            await each_rank(world, work)


async def test_a_module_may_have_a_state_dict_of_its_own_without_arguments() -> None:
    class Own(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict()

    async with local_cluster(1) as (backend,), AsyncFSDP(Own(2, 2), backend) as model:
        whole = await model.full_state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == {"weight": (2, 2), "bias": (2,)}
        inventory = Inventory([model, Own(2, 2)])
        assert [[entry.name for entry in each] for each in inventory.modules()] == [["weight", "bias"]] * 2


async def test_state_in_the_parameters_dtype_stays_in_it() -> None:
    async with local_cluster(1) as (backend,):
        async with AsyncFSDP(linears(1), backend) as model:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
            await step(model, optimizer)
            for state in optimizer.state.values():
                state["exp_avg_sq"] = state["exp_avg_sq"].double()
            found = kept(Inventory([model, optimizer]))
        async with AsyncFSDP(linears(1).bfloat16(), backend) as model:
            optimizer = torch.optim.AdamW(model.parameters())
            Inventory([model, optimizer]).load(*found)
            dtypes = {key: value.dtype for key, value in next(iter(optimizer.state.values())).items()}
            assert dtypes == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}


async def test_so_does_that_of_a_zero_optimizer() -> None:
    def check(backend: Backend) -> None:
        found: list[tuple[Any, ...]] = []
        for dtype in (torch.float32, torch.bfloat16):
            module = linears(1).to(dtype)
            optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, backend, module=module)
            inventory = Inventory([module, optimizer])
            if found:
                inventory.load(*found[0])
                dtypes = {key: value.dtype for key, value in optimizer.state[module.get_parameter("0.weight")].items()}
                assert dtypes == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
            module(torch.ones(2, 4, dtype=dtype)).square().mean().backward()
            optimizer.step()
            found.append(kept(inventory))

    async with local_cluster(1) as (backend,):
        await asyncio.to_thread(check, backend)


async def test_the_module_in_a_sharded_model_is_not_kept_by_itself() -> None:
    async with local_cluster(1) as (backend,), AsyncFSDP(linears(2), backend) as model:
        with pytest.raises(UsageError, match="Sequential has sharded parameters; give the sharded model that contains it"):
            Inventory([model.fsdp.module])
        with pytest.raises(UsageError, match="Linear has sharded parameters"):
            Inventory([model, model.fsdp.module.get_submodule("0")])


async def test_empty_slices_have_a_state_as_the_others_have() -> None:
    """A fused SGD does not step parameters of which only some have momentum."""

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(linears(2), backend) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
            inventory = Inventory([model, optimizer])
            assert any(not parameter.numel() for parameter in model.parameters())
            nothing = kept(inventory)
            await step(model, optimizer)
            found = kept(inventory)
            for state, keys in ((found, {"momentum_buffer"}), (nothing, set[str]())):
                optimizer.state.clear() if state is found else None
                await asyncio.to_thread(inventory.load, *state)
                for parameter in model.parameters():
                    assert optimizer.state.get(parameter, {}).keys() == keys
                    assert all(value.shape == parameter.shape for value in optimizer.state.get(parameter, {}).values())
                await step(model, optimizer)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)


async def test_a_state_of_before_the_first_step_is_taken_back() -> None:
    async with local_cluster(1) as (backend,):
        module = linears(2)
        async with AsyncFSDP(module, backend, ignored_modules=[module[1]]) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            inventory = Inventory([model, optimizer])
            found = kept(inventory)
            await step(model, optimizer)
            assert all(optimizer.state[parameter] for parameter in model.parameters())
            inventory.load(*found)
            assert not any(optimizer.state[parameter] for parameter in model.parameters())
