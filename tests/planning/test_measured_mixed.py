"""Compare plans of mixed precision with counts of what real training holds and sends."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.fsdp import FSDP, MixedPrecision, memory_report
from shardnet.planning import Setting, Strategy, plan
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.planning.test_measured import SIZES, STEPS, columns, counted, size


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD])
def test_bfloat16_over_float32_masters(strategy: Strategy, ranks: int, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)

    def work(backend: Backend) -> tuple[list[int], int]:
        model = FSDP(make_gpt(**SIZES), backend, units=Block, strategy=ShardingStrategy(strategy), mixed_precision=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model.memory.reset_peaks()
        for batch in token_batches(STEPS, 2):
            before = sum(counter.bytes for counter in backend.telemetry.ops.values())
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        sent = sum(counter.bytes for counter in backend.telemetry.ops.values()) - before
        return counted(memory_report(model, optimizer)), sent

    (planned,) = plan(size(), Setting(ranks, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype), [strategy])
    results = run_ranks(ranks, work, limits=Limits(eager_bytes=0))
    assert columns(planned.memory) == results[0][0]
    assert sum(sent for _, sent in results) == pytest.approx(ranks * planned.bytes_sent, rel=0.01)
