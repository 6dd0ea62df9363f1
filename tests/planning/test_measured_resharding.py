"""Compare plans of `reshard_after_forward` with counts of what real training holds, sends, and to which nodes."""

from dataclasses import dataclass

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.fsdp import FSDP, Compression, MemoryReport, MixedPrecision, memory_report
from shardnet.planning import Setting, Strategy, plan
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.planning.test_measured import FULL, GRAD, HYBRID, SIZES, STEPS, columns, counted, size

HALF = MixedPrecision(torch.bfloat16, torch.float32)


@dataclass
class Seen:
    """One rank's memory, and what it sent in the last step."""

    memory: MemoryReport
    bytes: dict[str, int]  # by operation
    across: int  # to other nodes


def train(setting: Setting, strategy: Strategy, precision: MixedPrecision) -> list[Seen]:
    node = setting.ranks_per_node

    def across(backend: Backend) -> int:
        peers = backend.telemetry.peers.items()
        return sum(seen.sent_memory + seen.sent_network for rank, seen in peers if rank // node != backend.rank // node)

    def work(backend: Backend) -> Seen:
        model = FSDP(
            make_gpt(**SIZES),
            backend,
            units=Block,
            strategy=ShardingStrategy(strategy),
            intra_node_size=node if strategy is HYBRID else None,
            prefetch=setting.prefetch,
            mixed_precision=precision,
            compression=setting.compression,
            reshard_after_forward=setting.reshard_after_forward,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model.memory.reset_peaks()
        for batch in token_batches(STEPS, 2):
            before, crossed = {op: counter.bytes for op, counter in backend.telemetry.ops.items()}, across(backend)
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            backend.barrier().wait()  # what other ranks still pass on through this one belongs to the step
        sent = {op: counter.bytes - before.get(op, 0) for op, counter in backend.telemetry.ops.items()}
        return Seen(memory_report(model, optimizer), sent, across(backend) - crossed)

    return run_ranks(setting.world_size, work, limits=Limits(eager_bytes=0), ranks_per_node=node)


def check(setting: Setting, strategy: Strategy, precision: MixedPrecision = MixedPrecision()) -> None:  # noqa: B008 - frozen
    (planned,) = plan(size(), setting, [strategy])
    every = train(setting, strategy, precision)
    first = every[0].memory
    assert [*columns(planned.memory), planned.memory.secondary] == [*counted(first), first.peak_secondary_shards]  # to the byte
    for seen in every:
        assert planned.memory.secondary == pytest.approx(seen.memory.peak_secondary_shards, rel=0.02)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        expected = setting.world_size * sum(traffic.bytes_sent for traffic in planned.traffic if traffic.op == op)
        assert sum(seen.bytes.get(op, 0) for seen in every) == pytest.approx(expected, rel=0.01)
    # at a byte a second, the planned seconds are the bytes that leave a node
    node, left = setting.ranks_per_node, sum(traffic.seconds or 0 for traffic in planned.traffic)
    busiest = max(sum(seen.across for seen in every[first : first + node]) for first in range(0, setting.world_size, node))
    assert busiest == pytest.approx(left if setting.nodes > 1 else 0, rel=0.01)


def setting_of(world_size: int, node_size: int | None, reshard_after_forward: bool | int, prefetch: int = 1, **choices: object) -> Setting:
    """A setting whose links between nodes are so slow that only their time counts."""
    speeds = {"inside_bytes_per_s": 1e18, "between_bytes_per_s": 1.0}
    return Setting(world_size, node_size=node_size, reshard_after_forward=reshard_after_forward, prefetch=prefetch, **choices, **speeds)  # type: ignore[arg-type]


# These differ in what is held, which also depends on the prefetch: each is tried with every prefetch.
KINDS = [
    (FULL, 4, None, 2),
    (FULL, 6, None, 3),
    (HYBRID, 8, 4, 2),
    (FULL, 4, 2, True),
    (FULL, 4, 2, False),
    (HYBRID, 4, 2, False),
    (GRAD, 4, 2, False),
]
# These differ in where nodes end. That affects only how much is sent to which node, which does not depend on the prefetch.
NODES = [
    (FULL, 4, 2, 2, 0),  # the neighbours are one node
    (FULL, 8, 4, 2, 1),  # half a node
    (FULL, 8, 2, 4, 2),  # two nodes
    (FULL, 6, 3, 2, 0),  # one pair spans two nodes
    (FULL, 6, 2, 3, 1),  # both groups of three do, with unequal parts
]


@pytest.mark.parametrize(
    ("strategy", "world_size", "node_size", "reshard_after_forward", "prefetch"),
    [*((*kind, prefetch) for kind in KINDS for prefetch in (0, 1, 2)), *NODES],
)
def test_memory_and_traffic_are_those_of_a_run(
    strategy: Strategy, world_size: int, node_size: int | None, reshard_after_forward: bool | int, prefetch: int
) -> None:
    check(setting_of(world_size, node_size, reshard_after_forward, prefetch), strategy)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_secondary_shards_are_kept_in_the_dtype_of_compute(prefetch: int) -> None:
    setting = setting_of(4, None, 2, prefetch, compute_dtype=HALF.param_dtype, reduce_dtype=HALF.reduce_dtype)
    check(setting, FULL, HALF)


def test_secondary_shards_are_not_compressed() -> None:
    check(setting_of(4, None, 2, compression=Compression("int8", "int8")), FULL)
