"""Plans of ZeRO-1 against what a `ZeroOptimizer` over a plain module holds and sends, counted."""

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
    def work(backend: Backend) -> tuple[int, int, dict[str, int]]:
        model = make_gpt(**SIZES)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, backend, module=model, units=[Block])
        before = {op: counter.bytes for op, counter in backend.telemetry.ops.items()}  # the ranks compared models
        for batch in token_batches(STEPS, 2):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        state = (value for entry in optimizer.state.values() for value in entry.values())
        held = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
        sent = {op: counter.bytes - before.get(op, 0) for op, counter in backend.telemetry.ops.items()}
        return sum(parameter.nbytes for parameter in model.parameters()), held, sent

    (planned,) = plan(size(), Setting(ranks), [Strategy.ZERO_1])
    results = run_ranks(ranks, work, limits=Limits(eager_bytes=0))
    for parameters, state, _ in results:
        assert planned.memory.parameters == parameters
        assert planned.memory.optimizer == pytest.approx(state, rel=0.02)
    for traffic in planned.traffic:
        assert sum(sent[traffic.op] for _, _, sent in results) == pytest.approx(STEPS * ranks * traffic.bytes_sent, rel=0.01)
