"""Compare plans of ZeRO-1 with counts of what a `ZeroOptimizer` over a plain module holds and sends."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.planning import Setting, Strategy, plan
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.planning.test_measured import SIZES, STEPS, size


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zero_1_holds_and_sends_what_is_planned(ranks: int) -> None:
    def work(backend: Backend) -> tuple[list[int], dict[str, int]]:
        model = make_gpt(**SIZES)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, backend, module=model, units=[Block])
        before = {op: counter.bytes for op, counter in backend.telemetry.ops.items()}  # what the ranks sent to compare their models
        for batch in token_batches(STEPS, 2):
            with optimizer.last_backward():
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            averaged = [piece.grad for piece in optimizer._sharded.pieces.values()]  # before step drops them
            gradients = sum(each.nbytes for each in (*averaged, *(parameter.grad for parameter in model.parameters())) if each is not None)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        state = (value for entry in optimizer.state.values() for value in entry.values())
        held = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
        sent = {op: counter.bytes - before.get(op, 0) for op, counter in backend.telemetry.ops.items()}
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        return [parameters, gradients, held, optimizer.memory.full_gradients.peak_bytes], sent

    (planned,) = plan(size(), Setting(ranks), [Strategy.ZERO_1])
    results = run_ranks(ranks, work, limits=Limits(eager_bytes=0))
    memory = planned.memory
    for counted, _ in results:
        assert [memory.parameters, memory.gradients, memory.optimizer] == pytest.approx(counted[:3], rel=0.02)
        assert memory.reducing >= counted[3] > 0  # fewer buckets are in flight at once if ranks are quick
        assert memory.total == pytest.approx(sum(counted), rel=0.1)
    for traffic in planned.traffic:
        assert sum(sent[traffic.op] for _, sent in results) == pytest.approx(STEPS * ranks * traffic.bytes_sent, rel=0.01)
