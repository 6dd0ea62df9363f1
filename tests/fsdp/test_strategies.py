"""Every sharding strategy trains as one process does, and holds and sends what it promises."""

import asyncio
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import CollectiveError
from shardnet.fsdp import FSDP, memory_report
from shardnet.sharding import ShardingStrategy
from shardnet.telemetry import Track
from shardnet.testing import each_rank, local_cluster
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import SAMPLES, Run, optimizer_for, train_alone

STEPS = 3  # both optimizers have state from the first one on
FULL, GRAD, NONE, HYBRID = ShardingStrategy
PLACES = [
    *((strategy, world_size, None) for strategy in (FULL, GRAD, NONE) for world_size in (1, 2, 3, 4)),
    (HYBRID, 4, 2),  # 2 x 2
    (HYBRID, 4, 1),
    (HYBRID, 4, 4),
    (HYBRID, 6, 2),
    (HYBRID, 6, 3),
]


# --- parity


@cache
def alone(optimizer_kind: str) -> Run:
    return train_alone(steps=STEPS, optimizer_kind=optimizer_kind)


def train(backend: Backend, strategy: ShardingStrategy, node: int | None, optimizer_kind: str, micro_batches: int) -> Run:
    model = FSDP(make_gpt(seed=backend.rank), backend, units=[Block], strategy=strategy, intra_node_size=node)
    optimizer = optimizer_for(model.parameters(), optimizer_kind)
    share = SAMPLES // backend.world_size
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        parts = batch[backend.rank * share :][:share].tensor_split(min(micro_batches, share))
        with model.no_sync():
            total = sum(_accumulate(model, part, len(part) / share) for part in parts[:-1])
        losses.append(total + _accumulate(model, parts[-1], len(parts[-1]) / share))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, model.full_state_dict())


def _accumulate(model: nn.Module, part: torch.Tensor, weight: float) -> float:
    loss = weight * loss_of(model, part)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer_kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("strategy", "world_size", "node"), PLACES)
def test_training_equals_one_process(
    strategy: ShardingStrategy, world_size: int, node: int | None, optimizer_kind: str, micro_batches: int
) -> None:
    runs = run_ranks(world_size, lambda backend: train(backend, strategy, node, optimizer_kind, micro_batches))
    expected = alone(optimizer_kind)
    losses = [sum(values) / world_size for values in zip(*(run.losses for run in runs), strict=True)]
    assert losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
    for run in runs:
        for name, value in expected.state.items():
            torch.testing.assert_close(run.state[name], value, rtol=0, atol=1e-5, msg=name)
            assert torch.equal(run.state[name], runs[0].state[name])  # no two ranks differ in a bit


@pytest.mark.parametrize(
    ("strategy", "world_size", "node"),
    [(FULL, 4, 2), (GRAD, 4, 2), (NONE, 4, 2), (HYBRID, 4, 2), (HYBRID, 6, 2), (HYBRID, 6, 3), (HYBRID, 3, 1)],
)
async def test_the_transport_changes_no_bit(strategy: ShardingStrategy, world_size: int, node: int) -> None:
    given = node if strategy is HYBRID else None
    in_memory = (await asyncio.to_thread(run_ranks, world_size, lambda backend: train(backend, strategy, given, "adamw", 1)))[0]

    async def work(backend: Backend) -> Run:
        return await asyncio.to_thread(train, backend, strategy, None, "adamw", 1)  # with the cluster's own nodes

    async with local_cluster(world_size, ranks_per_node=node) as backends:
        for run in await each_rank(backends, work):
            assert all(torch.equal(value, in_memory.state[name]) for name, value in run.state.items())


# --- memory and traffic


def test_bytes_held_and_gathers_of_each_strategy() -> None:
    """ZeRO's table: a rank holds 1 / shards of what is sharded, and nothing full-size stays after a step."""
    layers, ranks = 6, 4
    whole = sum(parameter.nbytes for parameter in make_gpt(layers=layers).parameters())
    rounding = 4 * (layers + 1)

    def work(backend: Backend, strategy: ShardingStrategy, node: int | None) -> int:
        model = FSDP(make_gpt(layers=layers), backend, units=[Block], strategy=strategy, intra_node_size=node)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in token_batches(2, ranks):
            before = backend.telemetry.ops["all_gather"].count if "all_gather" in backend.telemetry.ops else 0
            optimizer.zero_grad()
            loss_of(model, batch[backend.rank :][:1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        held = memory_report(model, optimizer)
        share = whole / (node or {NONE: 1}.get(strategy, ranks))
        for count in (held.parameter_shards, held.gradient_shards, held.optimizer_state):
            assert abs(count - share) <= rounding
        assert held.full_parameters == held.full_gradients == 0
        if strategy is GRAD:
            assert held.peak_full_parameters == whole  # kept from forward to backward
        elif strategy is NONE:
            assert held.peak_full_parameters == 0  # the shard is all there is
        else:
            assert held.peak_full_parameters < whole
        assert held.peak_full_gradients < whole
        return backend.telemetry.ops["all_gather"].count - before if "all_gather" in backend.telemetry.ops else 0

    units = layers + 1
    kept = 2  # of FULL_SHARD: the root and the last block are held for backward
    assert run_ranks(ranks, lambda backend: work(backend, FULL, None)) == [2 * units - kept] * ranks
    assert run_ranks(ranks, lambda backend: work(backend, HYBRID, 2)) == [2 * units - kept] * ranks
    assert run_ranks(ranks, lambda backend: work(backend, GRAD, None)) == [units] * ranks
    assert run_ranks(ranks, lambda backend: work(backend, NONE, None)) == [0] * ranks


def test_an_evaluation_keeps_nothing() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], strategy=GRAD)
        with torch.no_grad():
            loss_of(model, token_batches(1, 2)[0])
        assert memory_report(model).full_parameters == 0

    run_ranks(2, work)


# --- overlap and failure


def test_a_unit_is_averaged_across_nodes_while_others_compute() -> None:
    """The backward of the first layer does not go on before the last layer's average over nodes is done."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, backend: Backend) -> torch.Tensor:
            ctx.backend = backend  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            telemetry = ctx.backend.telemetry  # type: ignore[attr-defined]
            deadline = time.monotonic() + 20
            while not any(span.name.startswith("all_reduce") and span.name.endswith("layers.2") for span in telemetry.spans()):
                assert time.monotonic() < deadline, "the last layer was not averaged during backward"
                time.sleep(0.001)
            return gradient, None

    class Gated(nn.Module):
        def __init__(self, backend: Backend) -> None:
            super().__init__()
            self.backend = backend
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gated: torch.Tensor = Gate.apply(self.layers[0](x), self.backend)
            for layer in self.layers[1:]:
                gated = layer(gated)
            return gated

    def work(backend: Backend) -> None:
        backend.telemetry.tracing = True
        model = FSDP(Gated(backend), backend, units=[nn.Linear], strategy=HYBRID, intra_node_size=2)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            spans = [span for span in backend.telemetry.spans() if span.track is Track.COMMUNICATION and span.name.startswith("all_reduce")]
            begun = sorted(spans, key=lambda span: span.start_ns)  # they may end in another order
            assert [span.name.split()[-1] for span in begun] == ["layers.2", "layers.1", "layers.0"]
            backend.telemetry._spans.clear()

    run_ranks(4, work)


def test_what_fails_within_a_node_fails_everywhere_at_once() -> None:
    """Rank 0 mistakes one reduction for another. The other node, whose half goes well, does not wait; and training can go on."""

    def work(backend: Backend) -> float:
        model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), backend, units=[nn.Linear], strategy=HYBRID, intra_node_size=2)
        loss = model(torch.ones(2, 3)).sum()
        if backend.rank == 0:
            mislabel_next(model._comms.reductions)
        start = time.monotonic()
        with pytest.raises(CollectiveError):
            loss.backward()
        took = time.monotonic() - start
        assert memory_report(model).full_parameters == memory_report(model).full_gradients == 0
        model.zero_grad()
        model(torch.full((1, 3), float(backend.rank))).sum().backward()
        bias = dict(model.named_parameters())["1.bias"].grad
        assert bias is None or bias.tolist() in ([1.0], [])
        return took

    assert max(run_ranks(4, work)) < 5.0  # a collective's time-out is 15 s here


def mislabel_next(group: Backend) -> None:
    """Make this rank's next reduce_scatter differ from the others'."""
    real = group.reduce_scatter

    def mistaken(*args: Any, label: str, **options: Any) -> Any:
        vars(group).pop("reduce_scatter")
        return real(*args, label=f"not {label}", **options)

    vars(group)["reduce_scatter"] = mistaken
