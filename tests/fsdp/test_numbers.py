"""Small cases whose numbers are known by hand, over loopback and in real processes; and what is refused before anything is sent."""

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.conftest import START_S
from tests.fsdp.crew import crew
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.numbers import NUMBERS, Number
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import optimizer_for
from tests.training.workers import Nursery

# --- numbers


def as_json(results: list[Any]) -> Any:
    return json.loads(json.dumps(results))


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_over_loopback(number: Number) -> None:
    results = run_ranks(len(number.results), lambda backend: number.work(backend, *number.arguments))
    assert as_json(results) == number.results


def hybrid_training(backend: Backend, node: int | None) -> tuple[int, list[float]]:
    """The size of this rank's node, and the losses of some steps."""
    model = FSDP(make_gpt(seed=backend.rank), backend, units=[Block], strategy=ShardingStrategy.HYBRID_SHARD, intra_node_size=node)
    optimizer = optimizer_for(model.parameters())
    losses = []
    for batch in token_batches(3, 4):
        loss = loss_of(model, batch[backend.rank :][:1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model._comms.shard_count, losses


@pytest.mark.timeout(2 * START_S)
def test_in_processes_over_the_network(nursery: Nursery) -> None:
    """All in one test: its processes meet in one job for each, and starting them takes longer than all of the jobs."""
    with crew(nursery) as processes:
        for number in NUMBERS:
            assert processes.run(len(number.results), number.work, *number.arguments) == number.results, str(number)
        trained = processes.run(4, hybrid_training, None, nodes=("left", "left", "right", "right"))
    assert trained == as_json(run_ranks(4, lambda backend: hybrid_training(backend, 2)))  # bit for bit
    assert [shards for shards, _ in trained] == [2] * 4


# --- what is refused


def test_a_size_of_nodes_needs_nodes() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="intra_node_size is for HYBRID_SHARD only, got strategy FULL_SHARD"):
            FSDP(Weighted(), backend, intra_node_size=1)

    run_ranks(1, work)


def test_wrong_arguments_are_refused_before_any_traffic() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="prefetch"):
            FSDP(Weighted(), backend, prefetch=-1)
        with pytest.raises(UsageError, match=r"'no_such' is not a sharding strategy; choose one of ShardingStrategy\.FULL_SHARD, "):
            FSDP(Weighted(), backend, strategy="no_such")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no forward"):
            FSDP(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), backend, units=[nn.ModuleList])
        with pytest.raises(UsageError, match="units must be"):
            FSDP(Weighted(), backend, units=["Linear"])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="units: the model has no Bilinear or Conv1d; its modules are Linear, Sequential"):
            FSDP(nn.Sequential(nn.Linear(1, 1)), backend, units=[nn.Bilinear, nn.Conv1d])

    run_ranks(1, work)


def test_wrapping_twice_and_converting_later_are_refused() -> None:
    def work(backend: Backend) -> None:
        inner = Weighted()
        model = FSDP(inner, backend)
        with pytest.raises(UsageError, match="already"):
            FSDP(nn.Sequential(model), backend)
        with pytest.raises(UsageError, match=f"0.weight is sharded already, in {type(inner).__name__} of another"):
            FSDP(nn.Sequential(inner), backend)
        with pytest.raises(StateError, match="before wrapping"):
            model.double()
        FSDP(model.unwrap(), backend)

    run_ranks(1, work)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_is_refused(make: Callable[[FSDP], object]) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(StateError, match="full_state_dict"):
            make(FSDP(Weighted(), backend))

    run_ranks(1, work)


def test_a_copy_of_the_inner_module_is_refused_when_it_computes() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        with pytest.raises(StateError, match="a copy of a sharded module"):
            copy.deepcopy(model.module)(torch.ones(()))
        model(torch.ones(()))

    run_ranks(1, work)
