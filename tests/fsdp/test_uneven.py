"""Ranks with unequal numbers of samples: the mean is over samples, even if a rank has none."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import nullcontext
from itertools import zip_longest

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, MixedPrecision
from shardnet.sharding import ShardingStrategy
from shardnet.testing import each_rank, loopback_cluster
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
HELD = (5, 3, 0, 4)  # samples of each rank
SAMPLES = token_batches(1, sum(HELD))[0]
MAX_NORM = 0.5


def held_by(rank: int) -> Tensor:
    return torch.split(SAMPLES, list(HELD))[rank]


def batches_of(rank: int, size: int = 2) -> list[Tensor]:
    held = held_by(rank)
    return list(torch.split(held, size)) if len(held) else []


def train_alone(steps: list[Tensor]) -> dict[str, Tensor]:
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for samples in steps:
        loss_of(model, samples).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(backend: Backend, batches: list[Tensor], accumulate: int = 1, **arguments: object) -> dict[str, Tensor]:
    model = FSDP(make_gpt(), backend, units=[Block], **arguments)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for part in model.uneven(batches, accumulate=accumulate, dummy=SAMPLES[:1]):
        with nullcontext() if part.last else model.no_sync():
            (part.weight * loss_of(model, part.batch)).backward()  # type: ignore[no-untyped-call]
        if part.last:
            model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model.full_state_dict()


def check(states: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for state in states:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_equals_one_process_on_all_samples(strategy: ShardingStrategy, accumulate: int) -> None:
    """Steps of 6, 5 and 1 samples, or one step of 12 in three parts."""
    node = 2 if strategy is ShardingStrategy.HYBRID_SHARD else None
    rounds = zip_longest(*(batches_of(rank) for rank in range(4)))
    steps = [torch.cat([batch for batch in batches if batch is not None]) for batches in rounds]
    expected = train_alone(steps if accumulate == 1 else [torch.cat(steps)])
    check(
        run_ranks(4, lambda backend: train(backend, batches_of(backend.rank), accumulate, strategy=strategy, intra_node_size=node)),
        expected,
    )


def test_mixed_precision_equals_one_process_as_closely_as_with_even_data() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    expected = train_alone([SAMPLES])

    def difference(size: int, batches: Callable[[int], list[Tensor]]) -> float:
        state = run_ranks(size, lambda backend: train(backend, batches(backend.rank), mixed_precision=precision))[0]
        return max((state[name] - value).abs().max().item() for name, value in expected.items())

    uneven, even = difference(4, lambda rank: batches_of(rank, 5)), difference(4, lambda rank: [SAMPLES[3 * rank :][:3]])
    assert 0 < uneven < 2 * even


def flat(backend: Backend) -> FSDP:
    return FSDP(Weighted(), backend)


def weights(model: FSDP, batches: list[Tensor], **arguments: object) -> list[tuple[float, float, int, int, bool]]:
    """(first value of the batch, weight, samples, total, last) of every part."""
    steps = model.uneven(batches, **arguments)  # type: ignore[arg-type]
    return [(part.batch.flatten()[0].item(), part.weight, part.samples, part.total, part.last) for part in steps]


def test_all_ranks_go_on_until_the_last_one_is_out_of_batches() -> None:
    def work(backend: Backend) -> list[tuple[float, float, int, int, bool]]:
        batches = [torch.full((2,), 10.0), torch.full((1,), 11.0), torch.full((1,), 12.0)] if backend.rank else [torch.full((4,), 20.0)]
        return weights(flat(backend), batches)

    first, second = run_ranks(2, work)
    assert first == [(20, pytest.approx(8 / 6), 4, 6, True), (20, 0, 0, 1, True), (20, 0, 0, 1, True)]
    assert second == [(10, pytest.approx(4 / 6), 2, 6, True), (11, 2, 1, 1, True), (12, 2, 1, 1, True)]


def test_samples_may_be_tokens_and_batches_without_any_are_passed_over() -> None:
    def work(backend: Backend) -> list[tuple[float, float, int, int, bool]]:
        tokens = [[3.0, 1, 0], [0.0], [4.0]] if backend.rank else [[2.0, 1, 1], [0.0], [0.0]]
        return weights(flat(backend), [torch.tensor(each) for each in tokens], samples=lambda batch: int((batch > 0).sum()))

    first, second = run_ranks(2, work)
    assert first == [(2, pytest.approx(6 / 5), 3, 5, True), (2, 0, 0, 1, True)]
    assert second == [(3, pytest.approx(4 / 5), 2, 5, True), (4, 2, 1, 1, True)]


def test_a_rank_that_has_nothing_to_compute_on_is_named_everywhere() -> None:
    def work(backend: Backend) -> None:
        model = flat(backend)
        with pytest.raises(StateError, match=r"rank 1 has had no samples yet.*dummy="):
            weights(model, [] if backend.rank == 1 else [torch.ones(2)])
        assert weights(model, []) == []
        model(torch.tensor(1.0)).backward()  # the model goes on

    run_ranks(3, work)


def test_what_makes_no_sense_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="accumulate must be at least 1, got 0"):
            flat(backend).uneven([], accumulate=0)
        with pytest.raises(UsageError, match="contains no tensor"):
            list(flat(backend).uneven(["text"]))

    run_ranks(1, work)


def test_the_loop_may_be_left_early() -> None:
    def work(backend: Backend) -> list[int]:
        model = flat(backend)
        seen = []
        for _ in range(2):
            for part in model.uneven([torch.ones(3), torch.ones(2)]):
                seen.append(part.samples)
                break
        return seen

    assert run_ranks(2, work) == [[3, 3], [3, 3]]


async def _awaited(batches: list[Tensor]) -> AsyncIterator[Tensor]:
    for batch in batches:
        await asyncio.sleep(0)
        yield batch


@pytest.mark.parametrize("read", [list, _awaited])
async def test_it_is_the_same_for_async_programs(read: Callable[[list[Tensor]], Iterable[Tensor] | AsyncIterable[Tensor]]) -> None:
    async def work(backend: Backend) -> dict[str, Tensor]:
        async with AsyncFSDP(make_gpt(), backend, units=[Block]) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
            async for part in model.uneven(read(batches_of(backend.rank, 5)), dummy=SAMPLES[:1]):
                await model.backward(part.weight * await model.run(loss_of, model.fsdp, part.batch))
                await model.clip_grad_norm(MAX_NORM)
                await model.step(optimizer)
            return await model.full_state_dict()

    async with loopback_cluster(4) as backends:
        check(await each_rank(backends, work), train_alone([SAMPLES]))


def test_batches_that_are_awaited_want_steps_that_are() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="the batches are an async iterable: use `async for part in"):
            next(iter(flat(backend).uneven(_awaited([]))))

    run_ranks(1, work)
