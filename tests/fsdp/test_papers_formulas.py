"""Counted bytes of every strategy on 1, 2 and 4 ranks against the formulas of the ZeRO paper, and the table of docs/strategies.md.

[Note: formulas] For Ψ parameters the paper (Rajbhandari et al., 2020, section 3) has 2Ψ + 2Ψ + KΨ bytes: 16-bit parameters and
gradients, and K = 12 for Adam with float32 copies. All in float32 it is 4Ψ + 4Ψ + 8Ψ. ZeRO-1 divides the last term by N, ZeRO-2 the
second one, too, and ZeRO-3 all. Shards of two ranks differ by at most one element a group, and AdamW counts steps in 4 bytes a tensor.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt import GPT, Block, GPTConfig
from shardnet.backend import Backend
from shardnet.fsdp import FSDP, memory_report
from shardnet.planning import Strategy
from shardnet.sharding import ShardingStrategy
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import seeded
from tests.fsdp.ranks import run_ranks

FULL, GRAD, HYBRID, ZERO_1, NONE = Strategy
WORLD_SIZES = (1, 2, 4)
NODE = 2  # ranks per node, for HYBRID_SHARD
PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
# How many bytes of parameters, gradients and Adam's moments one of N ranks holds for each parameter of the model.
FORMULAS: dict[Strategy, Callable[[int], float]] = {
    NONE: lambda ranks: 4 + 4 + 8,
    ZERO_1: lambda ranks: 4 + 4 + 8 / ranks,
    GRAD: lambda ranks: (4 + 4 + 8) / ranks,
    FULL: lambda ranks: (4 + 4 + 8) / ranks,
    HYBRID: lambda ranks: (4 + 4 + 8) / min(ranks, NODE),
}


def make() -> GPT:
    """The demo's model."""
    with seeded(0):
        return GPT(GPTConfig(context=128))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    text = torch.arange(16)[None]
    loss = F.cross_entropy(model(text).flatten(0, 1), text.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def held(backend: Backend, strategy: Strategy) -> tuple[int, int]:
    """One rank's bytes after a step, gradients included; and the most bytes of whole parameters besides these."""
    inner = make()
    if strategy is ZERO_1:
        optimizer = ZeroOptimizer(inner.parameters(), torch.optim.AdamW, backend, module=inner, units=[Block])
        step(inner, optimizer)
        optimizer.wait()
        state = (value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor))
        gradients = (parameter.grad for parameter in inner.parameters() if parameter.grad is not None)
        return sum(tensor.nbytes for tensor in (*inner.parameters(), *gradients, *state)), 0
    node = min(NODE, backend.world_size) if strategy is HYBRID else None
    model = FSDP(inner, backend, units=[Block], strategy=ShardingStrategy(strategy), intra_node_size=node)
    adam = torch.optim.AdamW(model.parameters())
    step(model, adam)
    report = memory_report(model, adam)
    return report.persistent, report.peak_full_parameters


@cache
def fullest(strategy: Strategy, world_size: int) -> tuple[int, int]:
    """The most of each over all ranks."""
    counts = run_ranks(world_size, lambda backend: held(backend, strategy))
    return max(kept for kept, _ in counts), max(whole for _, whole in counts)


@pytest.mark.parametrize(("strategy", "world_size"), list(product(FORMULAS, WORLD_SIZES)))
def test_a_rank_holds_what_the_paper_says(strategy: Strategy, world_size: int) -> None:
    """That is between steps. Within a step come units in flight (the root and two blocks), or all units if they stay until backward."""
    model = make()
    numel, block = (sum(parameter.numel() for parameter in part.parameters()) for part in (model, model.blocks[0]))
    groups, tensors = 1 + len(model.blocks), len(list(model.parameters()))
    kept, whole = fullest(strategy, world_size)
    assert 0 <= kept - FORMULAS[strategy](world_size) * numel <= 16 * groups + 4 * tensors
    in_flight = numel - (len(model.blocks) - 2) * block
    most = {GRAD: numel, FULL: in_flight, HYBRID: in_flight}.get(strategy, 0)
    assert whole == (4 * most if world_size > 1 else 0)


def test_the_page_has_what_was_counted() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+`.*\d,\d{3}", line)
    ]
    written = {name.split("`")[1]: [int(cell.replace(",", "")) for cell in cells[-3:]] for name, *cells in rows}
    names = {FULL: "FULL_SHARD", GRAD: "SHARD_GRAD_OP", HYBRID: "HYBRID_SHARD", ZERO_1: "ZeroOptimizer", NONE: "NO_SHARD"}
    assert written == {name: [fullest(strategy, world_size)[0] for world_size in WORLD_SIZES] for strategy, name in names.items()}
