"""Compressed gradients on nodes of several ranks: a node's sum is exact, data that leaves a node is packed, and no rank is left waiting."""

import asyncio
import gc
import math
import threading
from functools import partial
from typing import Any

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import ShardnetError
from shardnet.fsdp import FSDP, AsyncFSDP, Compression, memory_report
from shardnet.fsdp.compressed.codec import BlockwiseInt8Codec
from shardnet.fsdp.lent_gradients import LentGradients
from shardnet.sharding import ShardingStrategy
from shardnet.testing import local_cluster
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.fsdp.scaled import Scaled, counted, gradient, scaled_steps
from tests.fsdp.training import SAMPLES, optimizer_for

Tensor = torch.Tensor
GRADIENTS = Compression(gradients="int8", block=16)
WITHOUT_FEEDBACK = Compression(gradients="int8", block=16, residual=None)
INT8 = Compression(weights="int8", gradients="int8")
PACKER = "shardnet-packer"  # how the threads' names begin


def gradients_of(model: FSDP, inputs: Tensor, *, backend: Backend) -> Tensor:
    """The whole gradient of a step."""
    gradient(model, inputs)
    (weight,) = model.parameters()
    return asyncio.run(_gathered(backend, weight.grad))


async def _gathered(backend: Backend, part: Tensor | None) -> Tensor:
    assert part is not None
    counts = await backend.all_gather(torch.tensor([part.numel()]))
    return await backend.all_gather(part, sizes=counts.tolist())


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (6, 3), (6, 2), (8, 4)])
@pytest.mark.parametrize("numel", [1, 5, 64, 333])
def test_means_are_right(world_size: int, ranks_per_node: int, numel: int) -> None:
    """Also where ranks hold nothing, and where parts begin in the middle of a parameter."""
    mean = (world_size + 1) / 2

    def work(backend: Backend) -> Tensor:
        model = FSDP(Scaled(numel), backend, compression=GRADIENTS)
        return gradients_of(model, torch.arange(1.0, numel + 1) * (backend.rank + 1), backend=backend)

    for found in run_ranks(world_size, work, ranks_per_node=ranks_per_node):
        torch.testing.assert_close(found, torch.arange(1.0, numel + 1) * mean, rtol=0, atol=numel * mean / 127)


def test_what_cancels_inside_a_node_is_not_rounded() -> None:
    """A gradient of 1 beside one of 1000 that cancels over the ranks of a node: if each rank packed it, the 1 would round to 0."""

    def work(backend: Backend) -> Tensor:
        model = FSDP(Scaled(8), backend, compression=WITHOUT_FEEDBACK)
        return gradients_of(model, torch.tensor([1000.0 * (-1) ** backend.rank] + 7 * [1.0]), backend=backend)

    for found in run_ranks(4, work, ranks_per_node=2):
        torch.testing.assert_close(found, torch.tensor([0.0] + 7 * [1.0]))
    assert run_ranks(4, work)[0][1] == 0  # on one node each rank packs its own


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32, None])
def test_error_feedback_makes_up_for_what_is_rounded_across_nodes(residual: torch.dtype | None) -> None:
    """As above, but the gradients of nodes cancel."""
    steps = 40

    def work(backend: Backend) -> float:
        model = FSDP(Scaled(4), backend, compression=Compression(gradients="int8", residual=residual))
        x = torch.tensor([1000.0 * (-1) ** (backend.rank // 2), 1000.0, 1.0, 1.0])
        return sum(gradients_of(model, x, backend=backend)[2].item() for _ in range(steps))

    for total in run_ranks(4, work, ranks_per_node=2):
        assert total == pytest.approx(steps, abs=1000 / 127)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (6, 3)])
def test_what_leaves_a_node_is_its_sum_once(world_size: int, ranks_per_node: int) -> None:
    """It leaves once, however many ranks the node has; each rank keeps residuals for its part of the sum."""
    numel, nodes = 6 * 256 * 10, world_size // ranks_per_node

    def work(backend: Backend) -> tuple[int, int]:
        model = FSDP(Scaled(numel), backend, compression=Compression(gradients="int8"))
        gradient(model, torch.randn(numel))
        return counted(backend, "all_to_all").bytes, memory_report(model).gradient_residuals

    packed = numel + 4 * numel // 256
    for sent, kept in run_ranks(world_size, work, ranks_per_node=ranks_per_node):
        assert sent * ranks_per_node == packed * (nodes - 1) // nodes
        assert kept * ranks_per_node == 2 * numel


def test_nodes_of_different_sizes_exchange_directly() -> None:
    def work(backend: Backend) -> tuple[Tensor, int]:
        model = FSDP(Scaled(100), backend, compression=GRADIENTS)
        found = gradients_of(model, torch.full((100,), float(backend.rank)), backend=backend)
        return found, counted(backend, "reduce_scatter").count

    for found, sums in run_ranks(5, work, ranks_per_node=2):
        torch.testing.assert_close(found, torch.full((100,), 2.0), rtol=0, atol=4 / 127)
        assert sums == 0


def test_copies_that_span_nodes_are_averaged_over_the_others() -> None:
    def work(backend: Backend) -> Tensor:
        model = FSDP(Scaled(64), backend, strategy=ShardingStrategy.HYBRID_SHARD, intra_node_size=4, compression=GRADIENTS)
        return gradient(model, torch.full((64,), float(backend.rank)))

    for found in run_ranks(8, work, ranks_per_node=2):
        torch.testing.assert_close(found, torch.full((16,), 3.5), rtol=0, atol=7 / 127)


@pytest.mark.parametrize("planted", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_makes_every_rank_skip_one_step(planted: float) -> None:
    for skipped, taken in run_ranks(4, lambda backend: scaled_steps(backend, INT8, 8, 3, planted), ranks_per_node=2):
        assert skipped == (512.0, 1.0)
        assert taken[0] == 512.0
        assert taken[1] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_in_backward_and_accumulation_end_at_the_same_bits(micro_batches: int) -> None:
    def work(backend: Backend, in_backward: bool) -> dict[str, Any]:
        model = FSDP(make_gpt(), backend, units=[Block], compression=INT8)
        optimizer = optimizer_for(model.parameters())
        if in_backward:
            model.step_in_backward(optimizer)
        for batch in token_batches(3, 4 * micro_batches):
            first, *rest = batch[backend.rank * micro_batches :][:micro_batches].split(1)
            with model.no_sync():
                for part in rest:
                    loss_of(model, part).backward()  # type: ignore[no-untyped-call]
            loss_of(model, first).backward()  # type: ignore[no-untyped-call]
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        return model.full_state_dict()

    behind, within = (run_ranks(4, partial(work, in_backward=when), ranks_per_node=2)[0] for when in (False, True))
    assert all(torch.equal(value, within[name]) for name, value in behind.items())


async def test_gradients_that_are_read_where_they_are_come_to_the_same_bits() -> None:
    """Over gRPC, through memory, and without a network."""

    async def over_grpc(backend: Backend) -> dict[str, Tensor]:
        async with AsyncFSDP(make_gpt(), backend, units=[Block], compression=INT8) as model:
            assert all(isinstance(group.gradients, LentGradients) for group in model.fsdp.groups)
            optimizer = optimizer_for(model.parameters())
            for batch in token_batches(3, SAMPLES):
                await model.backward(await model.run(loss_of, model.fsdp, batch[backend.rank * 2 :][:2]))
                await model.step(optimizer)
                optimizer.zero_grad()
            return await model.full_state_dict()

    def in_memory(backend: Backend) -> dict[str, Tensor]:
        model = FSDP(make_gpt(), backend, units=[Block], compression=INT8)
        optimizer = optimizer_for(model.parameters())
        for batch in token_batches(3, SAMPLES):
            loss_of(model, batch[backend.rank * 2 :][:2]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return model.full_state_dict()

    expected = (await asyncio.to_thread(run_ranks, 4, in_memory, ranks_per_node=2))[0]
    async with local_cluster(4, ranks_per_node=2) as backends:
        states = await asyncio.gather(*(over_grpc(backend) for backend in backends))
    for state in states:
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


# --- when something goes wrong


class Broken(Exception):
    pass


@pytest.mark.parametrize("method", ["pack", "unpack"])
def test_what_goes_wrong_while_packing_is_told_and_keeps_nobody_waiting(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails on one rank, which raises the error. Ranks that would wait for its data get an error, too, and all can go on afterwards."""
    work_of, once = getattr(BlockwiseInt8Codec, method), threading.Lock()

    def fails_once(codec: BlockwiseInt8Codec, first: Tensor, second: Tensor) -> Any:
        if threading.current_thread().name.startswith(PACKER) and once.acquire(blocking=False):
            raise Broken("planted")
        return work_of(codec, first, second)

    def work(backend: Backend) -> str:
        model = FSDP(Scaled(64), backend, compression=WITHOUT_FEEDBACK)
        told = "fine"
        try:
            gradient(model, torch.ones(64))
        except (Broken, ShardnetError) as error:
            told = type(error).__name__
        backend.barrier().wait()
        torch.testing.assert_close(gradient(model, torch.full((64,), 2.0)), torch.full((16,), 2.0))
        return told

    monkeypatch.setattr(BlockwiseInt8Codec, method, fails_once)
    waits = ["CollectiveError"] if method == "pack" else []  # the rank of the same place on the other node; at once, not after a timeout
    assert sorted(run_ranks(4, work, ranks_per_node=2)) == ["Broken", *waits, *(3 - len(waits)) * ["fine"]]


def test_nobody_waits_for_a_packing_thread_that_has_ended() -> None:
    """While the interpreter ends, that thread may have ended before the loop thread and the training."""

    def work(backend: Backend) -> None:
        model = FSDP(Scaled(64), backend, compression=WITHOUT_FEEDBACK)
        model._comms.packer._thread.shutdown()
        torch.testing.assert_close(gradient(model, torch.full((64,), 2.0)), torch.full((16,), 2.0))

    run_ranks(4, work, ranks_per_node=2)


def test_the_packing_thread_ends_with_the_model() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Scaled(64), backend, compression=GRADIENTS)
        gradient(model, torch.ones(64))

    before = set(threading.enumerate())
    run_ranks(4, work, ranks_per_node=2)
    begun = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith(PACKER)]
    assert begun  # their models are in cycles, which the collector has to find
    gc.collect()
    for thread in begun:
        thread.join(10.0)
        assert not thread.is_alive()
