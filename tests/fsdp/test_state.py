"""Whole and sharded state: names, tied names, buffers, other world sizes, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardnet.backend import Backend
from shardnet.errors import SizeMismatchError, StateError, UsageError
from shardnet.fsdp import FSDP, ShardedState
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import GPT, Block, Weighted, make_gpt
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
STRATEGIES = pytest.mark.parametrize(("strategy", "node"), [(FULL, None), (GRAD, None), (NONE, None), (HYBRID, 2)])


class Normed(nn.Sequential):
    """Has buffers, one of them not in the state_dict."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(value, right[name]) for name, value in left.items())


def test_no_state_cannot_be_loaded() -> None:
    """A rank other than 0 gets no state from `full_state_dict(rank0_only=True)`."""

    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="the state to load is None: give every rank the full state dict"):
            FSDP(Weighted(), backend).load_full_state_dict(None)  # type: ignore[arg-type]  # no type checker stops who has none

    run_ranks(2, work)


def test_the_full_state_is_that_of_the_inner_module() -> None:
    def work(backend: Backend) -> None:
        expected = {name: value.clone() for name, value in make_gpt().state_dict().items()}
        model = FSDP(make_gpt(), backend, units=[Block])
        full = model.full_state_dict()
        assert equal(full, expected)
        assert full["head.weight"] is full["tokens.weight"]
        assert equal(model.state_dict(), expected)
        make_gpt(seed=5).load_state_dict(full)  # strict

    run_ranks(3, work)


def test_the_full_state_can_be_kept_on_rank_0_alone() -> None:
    def work(backend: Backend) -> int:
        return len(FSDP(Normed(), backend, units=[nn.Linear]).full_state_dict(rank0_only=True))

    assert run_ranks(3, work) == [len(Normed().state_dict()), 0, 0]


def test_the_state_is_a_copy() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Normed(), backend)
        full, sharded = model.full_state_dict(), model.sharded_state_dict()
        kept = {name: value.clone() for name, value in full.items()}
        kept_shards = {name: value.clone() for name, value in sharded.shards.items()}
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        assert equal(full, kept)
        assert equal(sharded.shards, kept_shards)
        assert sharded.rest["1.running_var"].tolist() == [1] * 5

    run_ranks(2, work)


@STRATEGIES
def test_a_full_state_loads_into_another_world_size(strategy: ShardingStrategy, node: int | None) -> None:
    saved = run_ranks(3, lambda backend: FSDP(make_gpt(seed=7), backend, units=[Block]).full_state_dict())[0]

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(seed=8), backend, units=[Block], strategy=strategy, intra_node_size=node)
        keys = model.load_full_state_dict(saved)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert equal(model.full_state_dict(), saved)

    run_ranks(4, work)


def test_buffers_are_loaded() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Normed(), backend)
        full = model.full_state_dict()
        full["1.running_mean"] = torch.arange(5.0)
        model.load_state_dict(full)
        assert dict(model.named_buffers())["1.running_mean"].tolist() == [0, 1, 2, 3, 4]

    run_ranks(2, work)


def test_an_ignored_module_may_have_a_sparse_buffer() -> None:
    """Which has no storage that could be a slice's."""

    def work(backend: Backend) -> None:
        graph = nn.Module()
        graph.register_buffer("edges", torch.eye(4).to_sparse())
        module = nn.Module()
        module.weighted, module.graph = Weighted(), graph
        full = FSDP(module, backend, ignored_modules=[graph]).full_state_dict()
        assert torch.equal(full["graph.edges"].to_dense(), torch.eye(4))
        assert full["weighted.weight"].shape == (4,)

    run_ranks(2, work)


def test_a_state_that_does_not_fit_is_refused() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        with pytest.raises(SizeMismatchError, match="as the shape of weight"):
            model.load_full_state_dict({"weight": torch.zeros(5)})
        with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
            model.load_full_state_dict({})
        with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
            model.load_full_state_dict({"weight": torch.zeros(4), "other": torch.zeros(1)})
        assert model.load_full_state_dict({"other": torch.zeros(1)}, strict=False).missing_keys == ["weight"]

    run_ranks(2, work)


def test_a_state_with_something_else_than_tensors_is_refused() -> None:
    """Such as the arrays that a checkpoint of another library holds; in the words of torch, which name the parameter."""

    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        for value, kind in ((torch.zeros(4).numpy(), "ndarray"), (None, "NoneType")):
            with pytest.raises(RuntimeError, match=rf"parameter named \"weight\", expected torch\.Tensor.*received <class '.*{kind}'>"):
                model.load_full_state_dict({"weight": value})

    run_ranks(2, work)


@STRATEGIES
def test_sharded_state_comes_back(strategy: ShardingStrategy, node: int | None) -> None:
    def work(backend: Backend) -> ShardedState:
        model = FSDP(make_gpt(), backend, units=[Block], strategy=strategy, intra_node_size=node)
        saved, expected = model.sharded_state_dict(), model.full_state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_sharded_state_dict(saved)
        assert equal(model.full_state_dict(), expected)
        return saved

    states = run_ranks(4, work)[: 1 if strategy is NONE else node]  # of one copy
    whole = make_gpt().state_dict()
    for name in states[0].slices:
        pieces = [state.shards[name] for state in states]
        assert torch.equal(torch.cat(pieces), whole[name].reshape(-1))
        assert [state.slices[name].numel for state in states] == [piece.numel() for piece in pieces]


def test_a_sharded_state_of_another_split_is_refused() -> None:
    saved = run_ranks(2, lambda backend: FSDP(make_gpt(), backend, units=[Block]).sharded_state_dict())[0]

    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="rank 0 of 2"):
            FSDP(make_gpt(), backend, units=[Block]).load_sharded_state_dict(saved)
        with pytest.raises(UsageError, match="full state"):
            FSDP(make_gpt(), backend).load_sharded_state_dict(saved)

    run_ranks(3, work)


def test_the_inner_module_is_still_a_gpt() -> None:
    """Code that uses parameter names keeps working: no prefix is added."""

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block])
        assert isinstance(model.module, GPT)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in make_gpt().named_parameters()]

    run_ranks(1, work)


class Fused(nn.Module):
    """Its state_dict has the halves of its parameter, under the names of the layers that it replaces, and what it computes of them; old
    states have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.arange(24.0).reshape(8, 3))
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]  # torch has no annotation for it

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}one"], state[f"{prefix}other"] = state.pop(f"{prefix}both").chunk(2)
        state[f"{prefix}mean"] = (state[f"{prefix}one"] + state[f"{prefix}other"]) / 2

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}{name}") for name in ("one", "other")])
        del state[f"{prefix}mean"]


def test_a_hook_that_transposes_a_square_parameter() -> None:
    """The view has the parameter's memory and shape, but is another tensor."""

    def transpose(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].T

    def work(backend: Backend) -> None:
        module = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.arange(9.0).reshape(3, 3))
        module.register_state_dict_post_hook(transpose)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        assert torch.equal(FSDP(module, backend).full_state_dict()["weight"], torch.arange(9.0).reshape(3, 3).T)

    run_ranks(2, work)


class Renaming(nn.Linear):
    """Loads states of an earlier version of itself."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}gamma" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}gamma")
        super()._load_from_state_dict(state, prefix, *args)


def wrapped() -> nn.Module:
    first = nn.Linear(3, 5)
    last = nn.Linear(3, 5)
    last.weight = first.weight
    return nn.Sequential(checkpoint_wrapper(first), nn.ReLU(), checkpoint_wrapper(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))), last)


def renamed() -> nn.Module:
    module = Normed()

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        for name in list(state):
            state[f"model.{name}"] = state.pop(name)

    module.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]  # torch has no annotation for it
    return module


@pytest.mark.parametrize("make", [wrapped, lambda: checkpoint_wrapper(Normed()), renamed, lambda: nn.Sequential(Fused(), Fused())])
def test_hooks_see_whole_parameters_and_may_change_the_state(make: Callable[[], nn.Module]) -> None:
    """As torch's checkpoint_wrapper does, which is usual with FSDP."""

    modules = [make(), make()]
    expected = {name: value.clone() for name, value in modules[0].state_dict().items()}

    def work(backend: Backend) -> None:
        module = modules[backend.rank]
        model = FSDP(module, backend)
        before = [*module.named_parameters()]
        assert equal(model.full_state_dict(), expected)
        assert all(one[1] is other[1] for one, other in zip(before, module.named_parameters(), strict=True))
        with model.summon_full_params():
            assert equal(model.full_state_dict(), expected)

    run_ranks(2, work)


@pytest.mark.parametrize("make", [wrapped, lambda: checkpoint_wrapper(Normed()), lambda: nn.Sequential(Fused(), Fused())])
def test_a_state_that_hooks_have_changed_is_loaded(make: Callable[[], nn.Module]) -> None:
    expected = make().state_dict()

    def work(backend: Backend) -> None:
        model = FSDP(make(), backend)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert model.load_full_state_dict(iter(expected.items())).missing_keys == []
        assert equal(model.full_state_dict(), expected)
        saved = model.sharded_state_dict()
        halves = {name for name in expected if name.rpartition(".")[2] in ("one", "other", "mean")}  # of slices
        assert saved.rest.keys() - halves == {name for name in expected if "running" in name or "num_batches" in name}
        model.load_sharded_state_dict(saved)
        assert equal(model.full_state_dict(), expected)

    run_ranks(3, work)


def test_the_inner_module_does_not_load_wholes_into_slices() -> None:
    expected = wrapped().state_dict()

    def work(backend: Backend) -> None:
        model = FSDP(wrapped(), backend)
        for holder, prefix in ((model.module, ""), (nn.ModuleDict({"model": model.module}), "model.")):
            with pytest.raises(StateError, match=r"of a sharded Sequential cannot .*: call load_state_dict\(\) of the FSDP model"):
                holder.load_state_dict({f"{prefix}{name}": value for name, value in expected.items()})
        model.unwrap().load_state_dict(expected)

    run_ranks(2, work)


def test_old_names_are_loaded_where_the_module_knows_them() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(Renaming(3, 4), nn.Linear(4, 4)), backend)
        old = {"0.gamma": torch.ones(4, 3), "0.bias": torch.zeros(4), "1.weight": torch.ones(4, 4), "1.bias": torch.zeros(4)}
        model.load_full_state_dict(old)
        assert equal(model.full_state_dict(), {name.replace("gamma", "weight"): value for name, value in old.items()})
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            model.load_full_state_dict({**old, "0.gamma": torch.ones(5, 3)})

    run_ranks(2, work)


def test_a_parameter_that_was_moved_is_whole_where_it_is() -> None:
    """As torch's pruning moves it."""

    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), backend)
        full = model.full_state_dict()
        layer = model.module.get_submodule("0")
        layer.register_parameter("moved", layer._parameters.pop("weight"))
        moved = model.full_state_dict()
        assert moved.keys() == {"0.moved", *full} - {"0.weight"}
        assert equal({"0.moved": moved.pop("0.moved")}, {"0.moved": full.pop("0.weight")})
        assert equal(moved, full)
        model.load_full_state_dict({**full, "0.moved": torch.ones(4, 3)})
        assert equal({"0.moved": model.full_state_dict()["0.moved"]}, {"0.moved": torch.ones(4, 3)})

    run_ranks(2, work)


def test_a_slice_that_a_module_saves_by_itself_is_refused() -> None:
    class Keeping(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.kept = [self.weight]

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}kept"] = self.kept[0].detach()

    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(Keeping()), backend)
        with pytest.raises(StateError, match=r"0\.kept in the state_dict\(\) of the sharded Sequential is this rank's slice"):
            model.full_state_dict()

    run_ranks(2, work)
