"""Prefetch: same results, bounded memory, and no update is lost."""

import asyncio
import time

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.testing import each_rank, local_cluster
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.numbers import EightEqual
from tests.fsdp.ranks import run_ranks
from tests.promises import within_s


def waiting(model: FSDP) -> bool:
    return model.has_pending_prefetch


CANCELLED_S = within_s(1.0)
EIGHT_SUMS = [float(60 * part + 15) for part in range(8)]


def test_a_second_prefetch_is_refused_and_forward_uses_the_first() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        assert not waiting(model)
        handles = model.prefetch_forward_params()
        assert len(handles) == 1
        for pending in handles:
            pending.wait()
        assert waiting(model)
        with pytest.raises(StateError, match="called twice"):
            model.prefetch_forward_params()
        assert model(torch.tensor(2.0)).item() == 20
        assert not waiting(model)
        model.prefetch_forward_params()
        assert model(torch.tensor(3.0)).item() == 30

    run_ranks(2, work)


def test_a_prefetch_gathers_no_more_than_the_units_in_flight() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(EightEqual(), backend, units=[Weighted], prefetch=2)
        for pending in model.prefetch_forward_params():
            pending.wait()
        assert model.memory.full_parameters.current_bytes == 2 * 6 * 4  # the root holds no parameters of its own
        with torch.no_grad():
            model(torch.tensor(1.0))
        assert model.memory.full_parameters.current_bytes == 0

    run_ranks(2, work)


@pytest.mark.parametrize("changing_rank", [0, 1, 2])
def test_an_update_after_the_prefetch_is_not_lost(changing_rank: int) -> None:
    """Only one rank's slice changes, but all ranks must gather again."""

    def work(backend: Backend) -> float:
        model = FSDP(Weighted(1, 2, 3), backend)
        model.prefetch_forward_params()
        if backend.rank == changing_rank:
            model.update_shards(torch.tensor([100.0]))
        return float(model(torch.tensor(1.0)).item())

    assert run_ranks(3, work) == [6 - (changing_rank + 1) + 100] * 3


def test_a_prefetch_between_forward_and_backward_survives_the_backward() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(EightEqual(), backend, units=[Weighted], prefetch=3)
        output = model(torch.tensor(1.0))
        model.prefetch_forward_params()
        output.sum().backward()
        assert waiting(model)
        with torch.no_grad():
            assert model(torch.tensor(1.0)).tolist() == EIGHT_SUMS
        assert model.memory.full_parameters.current_bytes == 0

    run_ranks(2, work)


def test_the_depth_does_not_change_a_bit() -> None:
    def gradients(prefetch: int) -> list[list[torch.Tensor]]:
        def work(backend: Backend) -> list[torch.Tensor]:
            model = FSDP(make_gpt(), backend, units=[Block], prefetch=prefetch)
            loss_of(model, token_batches(1, 4)[0][2 * backend.rank :][:2]).backward()  # type: ignore[no-untyped-call]
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

        return run_ranks(2, work)

    expected = gradients(0)
    for prefetch in (1, 2, 9):
        for mine, theirs in zip(gradients(prefetch), expected, strict=True):
            assert len(mine) == len(theirs) > 0
            assert all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def test_another_way_through_the_model_frees_what_was_prefetched_in_vain() -> None:
    class Skipping(EightEqual):
        chosen: tuple[int, ...] = tuple(range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.parts[index](x) for index in self.chosen])

    def work(backend: Backend) -> None:
        inner = Skipping()
        model = FSDP(inner, backend, units=[Weighted], prefetch=2)
        for chosen in [tuple(range(8)), (7, 1, 4), (0, 0, 5), (3,), tuple(reversed(range(8)))]:
            inner.chosen = chosen
            model.memory.reset_peaks()
            output = model(torch.tensor(1.0))
            assert output.tolist() == [EIGHT_SUMS[index] for index in chosen]
            output.sum().backward()
            assert model.memory.full_parameters.current_bytes == 0
            assert model.memory.full_parameters.peak_bytes <= 3 * 6 * 4

    run_ranks(2, work)


async def test_who_is_cancelled_while_it_waits_for_a_prefetch_leaves_it_to_the_next_forward() -> None:
    """The other rank has not entered: nothing of the prefetch has arrived yet, and no rank is disturbed."""
    batch = token_batches(1, 2)[0]
    alone = make_gpt()(batch)
    async with local_cluster(2) as ranks:
        models = await each_rank(ranks, lambda rank: asyncio.to_thread(FSDP, make_gpt(), rank, units=(Block,)))
        for _ in range(3):
            handles = models[0].prefetch_forward_params()
            waiting_for = [asyncio.ensure_future(_settled(pending)) for pending in handles]
            await asyncio.sleep(0)
            start = time.monotonic()
            for each in waiting_for:
                each.cancel()
            outcomes = await asyncio.gather(*waiting_for, return_exceptions=True)
            assert time.monotonic() - start < CANCELLED_S
            assert all(isinstance(each, asyncio.CancelledError) for each in outcomes)
            models[1].prefetch_forward_params()
            assert all(map(waiting, models))
            for logits in await asyncio.gather(*(asyncio.to_thread(model, batch) for model in models)):
                assert torch.equal(logits, alone)
            assert not any(map(waiting, models))


async def _settled(pending: Pending[None]) -> None:
    await pending
