"""Whole and sharded state: names, tied names, buffers, other world sizes, and refusals."""

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import SizeMismatchError, UsageError
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
        with pytest.raises(UsageError, match="no state to load: every rank must be given all of it"):
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
