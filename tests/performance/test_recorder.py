"""Statistics of real sharded training, over loopback."""

import asyncio
import math
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend, LoopbackBackend
from shardnet.backend.loopback import nodes_of
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Limits, Timeouts
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, Compression, ShardingStrategy
from shardnet.performance import (
    CommunicationOperation,
    PerformanceRecorder,
    TrainingFigures,
    Zero3PerformanceStats,
    cluster_figures,
    cluster_stats,
    measure_link,
)
from shardnet.telemetry import Telemetry, Track
from shardnet.testing import each_rank, local_cluster, loopback_cluster
from shardnet.transport.memory import MemoryMesh
from shardnet.wire import Chunk
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

STEPS, LAYERS, LENGTH = 4, 3, 12
GATHER, SCATTER, REDUCE = CommunicationOperation.ALL_GATHER, CommunicationOperation.REDUCE_SCATTER, CommunicationOperation.ALL_REDUCE
FULL, GRAD, NONE, HYBRID = ShardingStrategy
GATHERS = 2 * (LAYERS + 1) - 2  # in a step of FULL_SHARD: in forward and in backward, except for two units that are held


def train(
    backend: Backend,
    *,
    strategy: ShardingStrategy = FULL,
    samples: int = 2,
    micro_batches: int = 1,
    node: int | None = None,
    compression: Compression | None = None,
    link_bytes_per_s: float | None = None,
    between: Callable[[PerformanceRecorder, FSDP], None] = lambda recorder, model: None,
) -> PerformanceRecorder:
    """Some recorded steps of a small GPT; `between` is called after every step."""
    model = FSDP(make_gpt(layers=LAYERS), backend, units=[Block], strategy=strategy, intra_node_size=node, compression=compression)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with PerformanceRecorder(model, optimizer, link_bytes_per_s=link_bytes_per_s) as recorder:
        for batch in token_batches(STEPS, samples, length=LENGTH):
            with model.no_sync():
                for _ in range(micro_batches - 1):
                    recorder.count(samples=samples, tokens=samples * LENGTH)
                    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            recorder.count(samples=samples, tokens=samples * LENGTH)
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            between(recorder, model)
    return recorder


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_passes_steps_and_tokens_are_counted(micro_batches: int) -> None:
    passes = STEPS * micro_batches
    for recorder in run_ranks(2, lambda backend: train(backend, micro_batches=micro_batches)):
        stats, figures = recorder.zero3, recorder.figures()
        assert (stats.forward_passes, stats.backward_passes, stats.optimizer_steps) == (passes, passes, STEPS)
        throughput = stats.throughput_metrics
        assert throughput.total_forward_tokens == throughput.total_backward_tokens == passes * 2 * LENGTH
        assert (figures.steps, figures.samples, figures.tokens) == (STEPS, passes * 2, passes * 2 * LENGTH)
        assert figures.tokens_per_s == pytest.approx(figures.tokens / sum(figures.step_s))


def test_every_unit_is_a_layer_that_runs_once_a_pass() -> None:
    for recorder in run_ranks(2, train):
        layers = recorder.zero3.layer_timings
        assert set(layers) == {"GPT", *(f"blocks.{index}" for index in range(LAYERS))}
        assert {(layer.forward_executions, layer.backward_executions) for layer in layers.values()} == {(STEPS, STEPS)}
        assert sum(layer.total_forward_time for layer in layers.values()) == recorder.zero3.total_forward_time
        assert sum(layer.total_backward_time for layer in layers.values()) == recorder.zero3.total_backward_time


def test_time_is_compute_or_waiting_and_never_both() -> None:
    for recorder in run_ranks(2, train):
        figures, stats = recorder.figures(), recorder.zero3
        compute = stats.total_forward_time + stats.total_backward_time + stats.total_optimizer_time
        assert figures.compute_s == pytest.approx(compute / 1e9)
        assert figures.compute_s + figures.exposed_s <= figures.wall_s
        assert 0 < figures.communicating_s <= figures.wall_s
        assert figures.wall_s == pytest.approx(sum(figures.step_s))


@pytest.mark.parametrize(
    ("strategy", "gathers"), [(FULL, 2 * (LAYERS + 1) - 2), (GRAD, LAYERS + 1), (NONE, 0), (HYBRID, 2 * (LAYERS + 1) - 2)]
)
def test_collectives_are_counted_with_the_bytes_that_were_sent(strategy: ShardingStrategy, gathers: int) -> None:
    def work(backend: Backend) -> tuple[PerformanceRecorder, int]:
        recorder = train(backend, strategy=strategy, node=2 if strategy is HYBRID else None)
        return recorder, sum(counter.bytes for op, counter in backend.telemetry.ops.items() if op in (GATHER, SCATTER, REDUCE))

    for recorder, counted in run_ranks(4, work):
        stats = recorder.zero3
        totals = stats.communication_stats.totals
        reductions = STEPS * (LAYERS + 1)
        assert totals[GATHER].operations == STEPS * gathers
        assert totals[SCATTER].operations == (0 if strategy is NONE else reductions)
        assert totals[REDUCE].operations == (reductions if strategy in (NONE, HYBRID) else 0)
        assert sum(each.bytes for each in totals.values()) == recorder.figures().bytes_sent == counted
        assert stats.gradient_sync_time == totals[SCATTER].time + totals[REDUCE].time > 0


@pytest.mark.parametrize(("strategy", "node"), [(FULL, None), (HYBRID, 2)])
def test_compressed_gradients_are_counted_as_reductions_of_what_was_sent(strategy: ShardingStrategy, node: int | None) -> None:
    def work(backend: Backend) -> tuple[PerformanceRecorder, int]:
        recorder = train(backend, strategy=strategy, node=node, compression=Compression("int8", "int8"))
        return recorder, backend.telemetry.ops["all_to_all"].bytes

    for recorder, counted in run_ranks(4, work):
        totals = recorder.zero3.communication_stats.totals
        assert (totals[SCATTER].operations, totals[SCATTER].bytes) == (STEPS * (LAYERS + 1), counted)
        assert recorder.zero3.gradient_sync_time == totals[SCATTER].time + totals[REDUCE].time > 0


def test_communication_reaches_the_efficiency() -> None:
    alone = run_ranks(1, train)[0]
    assert alone.figures().efficiency == alone.zero3.optimization_efficiency.training_efficiency == 1.0
    for recorder in run_ranks(2, train):
        assert recorder.figures().efficiency < 1.0
        assert recorder.zero3.get_performance_summary().training_efficiency < 1.0


def train_with_zero(backend: Backend) -> PerformanceRecorder:
    model = make_gpt(layers=LAYERS)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, backend, module=model, lr=0.1)
    with PerformanceRecorder(backend, optimizer) as recorder:
        for batch in token_batches(STEPS, 2, length=LENGTH):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    optimizer.wait()
    return recorder


def test_a_training_without_fsdp_has_steps_and_communication() -> None:
    def work(backend: Backend) -> PerformanceRecorder:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with PerformanceRecorder(backend, optimizer) as recorder:
            for _ in range(STEPS):
                recorder.count(tokens=10)
                weight.grad = backend.all_reduce(weight.detach()).wait()
                optimizer.step()
        return recorder

    for recorder in run_ranks(2, work):
        assert (recorder.zero3.forward_passes, recorder.zero3.optimizer_steps) == (0, STEPS)
        assert recorder.zero3.communication_stats.totals[REDUCE].operations == STEPS
        assert (recorder.figures().tokens, recorder.figures().bytes_sent) == (10 * STEPS, 16 * STEPS)
        assert math.isnan(recorder.figures().exposed_share), "nobody has measured how long the loop waited"
    for recorder in run_ranks(2, train_with_zero):
        assert 0 <= recorder.figures().exposed_share < 1


def test_figures_end_with_the_last_step() -> None:
    def work(backend: Backend) -> tuple[TrainingFigures, TrainingFigures]:
        seen: list[TrainingFigures] = []

        def between(recorder: PerformanceRecorder, model: FSDP) -> None:
            before = recorder.figures()
            recorder.count(samples=1000)
            loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            seen.extend([before, recorder.figures()])

        train(backend, between=between)
        return seen[0], seen[1]

    for before, after in run_ranks(2, work):
        assert before == after


def test_what_is_paused_does_not_count() -> None:
    def work(backend: Backend) -> tuple[PerformanceRecorder, float]:
        paused_s: list[float] = []

        def validate(recorder: PerformanceRecorder, model: FSDP) -> None:
            with recorder.paused(), recorder.paused(), torch.no_grad():
                start = time.perf_counter()
                loss_of(model, token_batches(1, 64)[0])
                paused_s.append(time.perf_counter() - start)

        start = time.perf_counter()
        recorder = train(backend, between=validate)
        return recorder, time.perf_counter() - start - sum(paused_s)

    for recorder, rest_s in run_ranks(2, work):
        assert recorder.zero3.forward_passes == STEPS
        assert recorder.zero3.communication_stats.totals[GATHER].operations == STEPS * GATHERS
        assert 0 < recorder.figures().wall_s <= rest_s


def test_nothing_is_watched_after_close() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with PerformanceRecorder(model, optimizer) as recorder:
            assert recorder in backend.telemetry.observers
        recorder.close()
        loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert not backend.telemetry.observers
        assert recorder.zero3 == Zero3PerformanceStats()
        assert recorder.figures().steps == 0

    run_ranks(2, work)


def test_a_forward_that_raises_is_no_pass() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block])
        with PerformanceRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recorder:
            with pytest.raises(IndexError):
                model(torch.full((1, 4), 10_000))
            assert recorder.zero3.forward_passes == 0
            loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]
            layers = recorder.zero3.layer_timings
            assert sum(layer.total_forward_time for layer in layers.values()) == recorder.zero3.total_forward_time

    run_ranks(2, work)


def test_recomputation_belongs_to_backward() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), backend, units=[torch.nn.Linear])
        with PerformanceRecorder(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recorder:
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(model, x, use_reentrant=False).sum().backward()
            assert (recorder.zero3.forward_passes, recorder.zero3.backward_passes) == (1, 1)
            assert {layer.forward_executions for layer in recorder.zero3.layer_timings.values()} == {1}

    run_ranks(2, work)


def test_arguments_that_make_no_sense() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"optimizer must have step hooks, as a torch\.optim\.Optimizer has, got dict"):
            PerformanceRecorder(model, {})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="link_bytes_per_s must be more than 0, got 0"):
            PerformanceRecorder(model, optimizer, link_bytes_per_s=0)
        with PerformanceRecorder(model, optimizer) as recorder, pytest.raises(UsageError, match="got -1 and 0"):
            recorder.count(samples=-1)

    run_ranks(1, work)


async def test_the_cluster_sums_its_ranks_over_the_backend() -> None:
    async def work(backend: Backend) -> tuple[TrainingFigures, TrainingFigures, Zero3PerformanceStats]:
        recorder = await asyncio.to_thread(train, backend, samples=1 + backend.rank)
        mine = recorder.figures()
        return mine, await cluster_figures(backend, mine), await cluster_stats(backend, recorder.zero3)

    async with loopback_cluster(3) as backends:
        ranks = await each_rank(backends, work)
    own = [mine for mine, _, _ in ranks]
    for _, cluster, stats in ranks:
        assert cluster == TrainingFigures.merge(own)
        assert (cluster.ranks, cluster.samples) == (3, STEPS * (1 + 2 + 3))
        assert cluster.tokens_per_s == pytest.approx(cluster.tokens / max(each.wall_s for each in own))
        assert (stats.forward_passes, stats.throughput_metrics.total_forward_tokens) == (3 * STEPS, cluster.tokens)


async def test_ranks_at_different_steps_are_told_so() -> None:
    async def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="ranks have measured 0, 1 steps"):
            await cluster_figures(backend, TrainingFigures(steps=backend.rank))

    async with loopback_cluster(2) as backends:
        await each_rank(backends, work)


async def test_the_link_is_measured_by_all_ranks_at_once() -> None:
    async def work(backend: Backend) -> float | None:
        return await measure_link(backend, probe_bytes=1 << 20)

    async with loopback_cluster(3) as backends:
        speeds = await each_rank(backends, work)
        assert all(speed is not None and speed > 1e6 for speed in speeds)
    async with loopback_cluster(1) as backends:
        assert await each_rank(backends, work) == [None]


class SlowInto0(MemoryMesh):
    """What the last rank sends to rank 0 arrives late."""

    async def send(self, peer: int, chunk: Chunk) -> None:
        if peer == 0 and self.rank == 2:
            await asyncio.sleep(0.05)
        await super().send(peer, chunk)


async def test_a_link_is_as_fast_as_it_sends_however_slowly_the_rank_receives() -> None:
    backends = []
    for mesh in SlowInto0.connect(3):
        board = Switchboard(mesh, Telemetry(), Limits(), 5.0, nodes_of(3, None))
        mesh.attach(board)
        backends.append(LoopbackBackend(board, board.world, Timeouts.for_tests()))
    fast, _, slow = await each_rank(backends, lambda backend: measure_link(backend, probe_bytes=1 << 18))
    await asyncio.gather(*(backend.aclose() for backend in backends))
    assert fast is not None
    assert slow is not None
    assert slow < (1 << 18) / 0.05 < fast


async def test_the_network_is_compared_with_the_links_between_nodes() -> None:
    """And what goes through memory with nothing."""

    async def work(backend: Backend) -> tuple[TrainingFigures, TrainingFigures]:
        mine = (await asyncio.to_thread(train, backend, link_bytes_per_s=1e6)).figures()
        return mine, await cluster_figures(backend, mine)

    async with local_cluster(4, ranks_per_node=2) as backends:
        ranks = await each_rank(backends, work)
    own, whole = [mine for mine, _ in ranks], ranks[0][1]
    assert all(0 < each.network_bytes < each.bytes_sent for each in own)
    assert [each.capacity_bytes for each in own] == [0, own[1].communicating_s * 1e6, 0, own[3].communicating_s * 1e6]
    sent = sum(each.network_bytes for each in own)
    assert whole.link_share == pytest.approx(sent / (1e6 * (own[1].communicating_s + own[3].communicating_s)))
    async with local_cluster(2) as backends:
        for mine, whole in await each_rank(backends, work):
            assert (mine.link_share, whole.link_share) == (None, None)


async def test_what_is_paused_is_not_compared_with_the_link() -> None:
    async def work(backend: Backend) -> TrainingFigures:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with PerformanceRecorder(backend, optimizer) as recorder:
            for _ in range(STEPS):
                weight.grad = await backend.all_reduce(weight.detach())
                with recorder.paused():
                    await backend.all_reduce(torch.ones(1000))
                optimizer.step()
        return recorder.figures()

    async with loopback_cluster(2, ranks_per_node=1) as backends:
        for mine in await each_rank(backends, work):
            assert mine.network_bytes == mine.bytes_sent == 16 * STEPS


def test_a_rank_alone_waits_for_nobody() -> None:
    """It is known, too: there was nothing to wait for."""
    assert recorded_alone(pause=lambda _: None).exposed_s == 0.0


def test_waiting_within_a_pause_does_not_count() -> None:
    assert recorded_alone(pause=lambda telemetry: telemetry.record("wait", Track.EXPOSED, 0, 10**9)).exposed_s == 0.0


def recorded_alone(pause: Callable[[Telemetry], None]) -> TrainingFigures:
    """One step of a world of one, with a pause before it."""
    (backend,) = LoopbackBackend.create_group(1)
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with PerformanceRecorder(backend, optimizer) as recorder:
        with recorder.paused():
            pause(backend.telemetry)
        optimizer.step()
    return recorder.figures()
