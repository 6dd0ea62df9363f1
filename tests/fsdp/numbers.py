"""Small cases with results worked out by hand, and cases that earlier systems got wrong: functions of a backend, with each rank's result.

They run over loopback and in real processes (test_numbers.py). So `work` is a function of a module, which the process finds by name,
and its result is something that JSON can carry.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import CollectiveMismatch, StateError, UsageError
from shardnet.fsdp import FSDP, GradScaler
from shardnet.performance import PerformanceRecorder, cluster_stats
from shardnet.sharding import ShardingStrategy
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Weighted

FULL, GRAD, NONE, HYBRID = ShardingStrategy


class Dot(nn.Module):
    """y = w . c with c = [1, 2, 3, 4], so that the gradient of w is c."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float32))

    def forward(self, scale: float) -> torch.Tensor:
        return scale * (self.weight * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()


def held(model: FSDP) -> list[float]:
    """This rank's slice of the one parameter."""
    (weight,) = model.parameters()
    return weight.tolist()


def gradient(model: FSDP) -> list[float]:
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.tolist()


# --- FULL_SHARD


def slices(backend: Backend, *values: float) -> tuple[list[float], float]:
    model = FSDP(Weighted(*values), backend)
    assert model.strategy is FULL
    assert model.backend is backend
    return held(model), model(torch.tensor(1.0)).item()


def one_step(backend: Backend) -> tuple[list[float], list[float]]:
    model = FSDP(Weighted(3, 5), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0)
    model(torch.tensor(1.0)).backward()
    optimizer.step()
    return held(model), gradient(model)


def output(backend: Backend, prefetch: bool) -> float:
    model = FSDP(Weighted(), backend)
    if prefetch:
        model.prefetch_forward_params()
    return float(model(torch.tensor(2.0)).item())


def mean_gradient(backend: Backend) -> list[float]:
    model = FSDP(Weighted(), backend)
    model(torch.tensor(float(2 + 4 * backend.rank))).backward()
    return gradient(model)


class WithBuffers(Weighted):
    def __init__(self, rank: int) -> None:
        super().__init__(*(float(rank * 10 + index) for index in range(5)))
        self.register_buffer("seen", torch.tensor([rank + 0.5]))
        self.register_buffer("count", torch.tensor(rank), persistent=False)


def first_contents(backend: Backend) -> tuple[list[float], dict[str, object]]:
    model = FSDP(WithBuffers(backend.rank), backend)
    return model.full_state_dict()["weight"].tolist(), {name: buffer.tolist() for name, buffer in model.named_buffers()}


def alone(backend: Backend) -> list[float]:
    model = FSDP(Weighted(), backend)
    model(torch.tensor(3.0)).backward()
    with pytest.raises(ValueError, match="FSDP update_shards: expected 4 elements but got 2"):
        model.update_shards(torch.tensor([10.0, 20.0]))
    return gradient(model)


def update_all(backend: Backend) -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), backend, units=[nn.Linear])
    before = torch.cat([parameter.detach() for parameter in model.parameters()])
    model.update_shards(before + 1)
    assert torch.equal(torch.cat([parameter.detach() for parameter in model.parameters()]), before + 1)
    model.broadcast_updated_params()  # this does nothing, but is allowed
    with pytest.raises(UsageError, match=f"expected {before.numel()} elements but got {before.numel() + 1}"):
        model.update_shards(torch.zeros(before.numel() + 1))


def synchronise_first(backend: Backend) -> None:
    with pytest.raises(StateError, match=r"Was forward\(\) called before backward\(\)\?"):
        FSDP(Weighted(), backend).sync_gradients()


def backward_on_rank_0(backend: Backend) -> list[float]:
    """The outermost unit is still gathered at that moment, so this takes no collective. A missing gradient counts as zeros."""
    model = FSDP(Weighted(), backend)
    with model.no_sync():
        result = model(torch.tensor(6.0))
        if backend.rank == 0:
            result.backward()
    assert [parameter.grad for parameter in model.parameters()] == [None]
    model.sync_gradients()
    return gradient(model)


def synchronise_again(backend: Backend) -> list[float]:
    model = FSDP(Weighted(), backend)
    model(torch.tensor(1.0)).backward()
    model.sync_gradients()
    return gradient(model)


# --- the other strategies


def update_and_broadcast(backend: Backend) -> tuple[list[float], list[float], float, int]:
    model = FSDP(Dot(1.0, 2.0, 3.0, 4.0), backend, strategy=GRAD)
    model(1.0).backward()
    (weight,) = model.parameters()
    with torch.no_grad():
        weight.add_(10.0 * (backend.rank + 1))
    model.broadcast_updated_params()
    before = backend.telemetry.ops["all_gather"].count
    result = model(1.0).item()
    gathers = backend.telemetry.ops["all_gather"].count - before
    return gradient(model), model.full_state_dict()["weight"].tolist(), result, gathers


def update_after_broadcast(backend: Backend) -> float:
    model = FSDP(Dot(1.0, 2.0, 3.0, 4.0), backend, strategy=GRAD)
    model.broadcast_updated_params()
    if backend.rank == 1:
        model.update_shards(torch.tensor([0.0, 0.0]))
    model.broadcast_updated_params()  # again, before any forward
    if backend.rank == 0:
        model.update_shards(torch.tensor([5.0, 0.0]))
    return float(model(1.0).item())


def hybrid_step(backend: Backend) -> tuple[list[float], list[float]]:
    model = FSDP(Dot(10.0, 20.0, 30.0, 40.0), backend, strategy=HYBRID, intra_node_size=2)
    before = held(model)
    model([2.0, 10.0][backend.rank // 2]).backward()
    return before, gradient(model)


def hybrid_prefetch(backend: Backend) -> float:
    model = FSDP(Weighted(), backend, strategy=HYBRID, intra_node_size=2)
    model.prefetch_forward_params()
    assert model.has_pending_prefetch
    model.update_shards(torch.full((2,), 1.0 + backend.rank % 2))
    return float(model(torch.tensor(1.0)).item())


def hybrid_of(backend: Backend, size: int) -> None:
    with pytest.raises(ValueError, match=f"HybridShard: world_size=4 must be a positive multiple of intra_node_size={size}"):
        FSDP(Weighted(), backend, strategy=HYBRID, intra_node_size=size)


def average(backend: Backend) -> tuple[list[float], list[float]]:
    model = FSDP(Weighted(), backend, strategy=NONE)
    model(torch.tensor(1.0 + backend.rank)).backward()
    return held(model), gradient(model)


def prefetch_with(backend: Backend, strategy: str) -> None:
    model = FSDP(Weighted(), backend, strategy=ShardingStrategy(strategy))
    with pytest.raises(UsageError, match=f"FULL_SHARD and HYBRID_SHARD; this model has {model.strategy.name}"):
        model.prefetch_forward_params()


# --- ZeRO-1, scaled gradients, unequal numbers of samples, statistics


def sharded_optimizer(backend: Backend) -> tuple[list[float], int]:
    """The weights after a step, and for how many of them this rank has the momentum."""
    model = Dot(10, 20, 30, 40)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, backend, lr=1.0, momentum=0.9)
    model(1.0 + backend.rank).backward()
    optimizer.step()
    return model.weight.tolist(), sum(entry["momentum_buffer"].numel() for entry in optimizer.state.values())


def overflow(backend: Backend, sharded: str) -> tuple[float, list[float]]:
    """An overflow in the first of two steps, only on rank 1: the scale at the end, and the weights."""
    dot = Dot(1, 2, 3, 4)
    model = dot if sharded == "optimizer" else FSDP(dot, backend)
    if sharded == "optimizer":
        optimizer: torch.optim.Optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, backend, lr=1.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler(backend, init_scale=8.0)
    for factor in (math.inf if backend.rank == 1 else 1.0, 1.0):
        scaler.scale(model(factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), next(model.parameters()).tolist()


def unequal_samples(backend: Backend) -> list[list[float]]:
    """The gradient of each step, which is the mean over samples even if rank 1 has none."""
    model = FSDP(Dot(1, 1, 1, 1), backend)
    batches = [torch.tensor([1.0, 2, 3]), torch.tensor([5.0, 7])] if backend.rank == 0 else [torch.tensor([10.0])]
    gradients = []
    for part in model.uneven(batches, dummy=torch.zeros(1)):
        (part.weight * model(part.batch.mean())).backward()
        gradients.append(gradient(model))
        model.zero_grad()
    return gradients


def statistics(backend: Backend) -> tuple[int, int, int, int, list[str], bool]:
    """The cluster's statistics of two steps: passes, steps, tokens forward, layers, and whether communication lowers the efficiency."""
    model = FSDP(EightEqual(), backend, units=[Weighted])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with PerformanceRecorder(model, optimizer) as recorder:
        for _ in range(2):
            recorder.count(samples=1, tokens=10 * (1 + backend.rank))
            model(torch.tensor(1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    stats = asyncio.run(cluster_stats(backend, recorder.zero3))
    summary = stats.get_performance_summary()
    tokens = stats.throughput_metrics.total_forward_tokens
    layers = sorted(stats.layer_timings)
    return stats.forward_passes, stats.backward_passes, stats.optimizer_steps, tokens, layers, summary.training_efficiency < 1


# --- what earlier systems got wrong


class EightEqual(nn.Module):
    """Eight units of one size: only their values would show that gathers are mixed up."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Weighted(*(float(10 * part + index) for index in range(6))) for part in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts])


def many_gathers_at_once(backend: Backend) -> int:
    model = FSDP(EightEqual(), backend, units=[Weighted], prefetch=7)
    wrong = 0
    with torch.no_grad():
        for _ in range(300):
            model.prefetch_forward_params()
            wrong += model(torch.tensor(1.0)).tolist() != [float(60 * part + 15) for part in range(8)]
    return wrong


def step_after_prefetch(backend: Backend) -> float:
    model = FSDP(Weighted(), backend)
    (before,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    model(torch.tensor(1.0)).backward()
    model.prefetch_forward_params()
    optimizer.step()
    (after,) = model.parameters()
    assert after is before
    return float(model(torch.tensor(1.0)).item())


class Refusing(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x < 0:
            raise ValueError("negative")
        return super().forward(x)


def forward_that_raises(backend: Backend) -> tuple[int, list[int], float]:
    model = FSDP(Refusing(), backend)
    with pytest.raises(ValueError, match="negative"):
        model(torch.tensor(-1.0))
    left = model.memory.full_parameters.current_bytes
    return left, [parameter.numel() for parameter in model.parameters()], model(torch.tensor(1.0)).item()


def peaks(backend: Backend, strategy: str) -> tuple[int, bool]:
    """The most units of 8 that were gathered at once; and whether no more than 3 had full gradients: one to collect, two to reduce."""
    model = FSDP(EightEqual(), backend, units=[Weighted], strategy=ShardingStrategy(strategy))
    model(torch.tensor(1.0)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.numel() == 3 for parameter in model.parameters())
    return model.memory.full_parameters.peak_bytes // 24, model.memory.full_gradients.peak_bytes <= 3 * 24


def mixed_up(backend: Backend) -> tuple[bool, bool, float]:
    dtype, size = (torch.float64, 2) if backend.rank else (torch.float32, 4)
    with pytest.raises(CollectiveMismatch) as refused:
        backend.all_gather(torch.ones(size, dtype=dtype)).wait()
    message = str(refused.value)
    return "float32 [4]" in message, "float64 [2]" in message, backend.all_reduce(torch.ones(1)).wait().item()


# --- all of them


class Number(NamedTuple):
    """One case: `work(backend, *arguments)` gives these results, by rank."""

    work: Callable[..., Any]
    results: list[Any]
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return "-".join(map(str, (self.work.__name__, *self.arguments, len(self.results))))


NUMBERS = [
    Number(slices, [[[10, 20], 100], [[30, 40], 100]], (10, 20, 30, 40)),
    Number(slices, [[[1, 2, 3], 28], [[4, 5], 28], [[6, 7], 28]], (1, 2, 3, 4, 5, 6, 7)),
    Number(one_step, [[[2.5], [1]], [[4.5], [1]], [[], []], [[], []]]),  # more ranks than elements
    *(Number(output, [20.0] * world_size, (prefetch,)) for world_size in (1, 2, 3) for prefetch in (False, True)),
    Number(mean_gradient, [[4, 4], [4, 4]]),
    Number(first_contents, [[[0, 1, 2, 3, 4], {"seen": [0.5], "count": 0}]] * 3),
    Number(alone, [[3, 3, 3, 3]]),
    Number(update_all, [None] * 2),
    Number(synchronise_first, [None] * 2),
    Number(backward_on_rank_0, [[2, 2], [2], [2]]),
    Number(synchronise_again, [[1, 1], [1, 1]]),
    Number(update_and_broadcast, [[[1, 2], [11, 12, 23, 24], 200, 0], [[3, 4], [11, 12, 23, 24], 200, 0]]),
    Number(update_after_broadcast, [5, 5]),
    Number(hybrid_step, [[[10, 20], [6, 12]], [[30, 40], [18, 24]]] * 2),
    Number(hybrid_prefetch, [6] * 4),
    *(Number(hybrid_of, [None] * 4, (size,)) for size in (3, 0, -2, 8)),
    Number(average, [[[1, 2, 3, 4], [2, 2, 2, 2]]] * 3),
    *(Number(prefetch_with, [None] * 2, (strategy.value,)) for strategy in (GRAD, NONE)),
    Number(sharded_optimizer, [[[8.5, 17, 25.5, 34], 2]] * 2),
    Number(sharded_optimizer, [[[8, 16, 24, 32], count] for count in (2, 1, 1)]),
    Number(overflow, [[4, [0, 0]]] * 2, ("parameters",)),
    Number(overflow, [[4, [0, 0, 0, 0]]] * 2, ("optimizer",)),
    Number(unequal_samples, [[[4, 8], [6, 12]], [[12, 16], [18, 24]]]),
    Number(statistics, [[4, 4, 4, 60, ["EightEqual", *(f"parts.{index}" for index in range(8))], True]] * 2),
    Number(many_gathers_at_once, [0, 0]),
    Number(step_after_prefetch, [6, 6]),
    Number(forward_that_raises, [[0, [2], 10]] * 2),
    Number(peaks, [[2, True]] * 2, (FULL.value,)),  # at most prefetch + 1 units, whatever the depth
    Number(peaks, [[8, True]] * 2, (GRAD.value,)),  # parameters are kept until backward, but not gradients
    Number(mixed_up, [[True, True, 2]] * 2),
]
