"""Compare plans of `cpu_offload` with counts of what training on a GPU holds, and where."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, MemoryReport, MixedPrecision, memory_report
from shardnet.planning import Setting, Strategy, plan
from shardnet.sharding import ShardingStrategy
from tests.devices import needs_gpu
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.planning.test_measured import FULL, GRAD, HYBRID, NONE, SIZES, STEPS, columns, counted, size

pytestmark = [needs_gpu, pytest.mark.timeout(180)]


def train(backend: Backend, strategy: Strategy, node: int | None, compute: torch.dtype | None) -> MemoryReport:
    model = FSDP(
        make_gpt(**SIZES).cuda(),
        backend,
        units=Block,
        strategy=ShardingStrategy(strategy),
        intra_node_size=node,
        mixed_precision=MixedPrecision(compute),
        cpu_offload=True,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model.memory.reset_peaks()
    for batch in token_batches(STEPS, 2).cuda():
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    stays = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    assert {tensor.device.type for tensor in stays if tensor is not None} == {"cpu"}
    return memory_report(model, optimizer)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("strategy", "ranks", "node"), [(FULL, 1, None), (FULL, 2, None), (GRAD, 2, None), (HYBRID, 4, 2), (NONE, 2, None)]
)
def test_memory_is_planned_to_the_byte(strategy: Strategy, ranks: int, node: int | None, compute: torch.dtype | None) -> None:
    setting = Setting(ranks, node_size=node, compute_dtype=compute, cpu_offload=True)
    (planned,) = plan(size(), setting, [strategy])
    first, *_ = run_ranks(ranks, lambda backend: train(backend, strategy, node, compute))
    assert columns(planned.memory) == counted(first)
    assert planned.memory.on_cpu == first.parameter_shards + first.gradient_shards + first.optimizer_state
    assert planned.memory.on_gpu == first.peak_full_parameters + first.peak_full_gradients
