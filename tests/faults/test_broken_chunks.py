"""Chunks that break on their way between two workers: each is noticed, no result has a wrong byte, and the next mesh works as usual."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from crc32c import crc32c

from shardnet import wire
from shardnet.backend import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.config import KIB, Limits, Timeouts
from shardnet.errors import ShardnetError
from shardnet.fsdp import AsyncFSDP
from shardnet.loop import LoopThread
from shardnet.testing import each_rank, local_cluster, same_bits
from tests.contract.programs import expected, inputs_of, random_step, start
from tests.faults.ledger import Scenario, scenario
from tests.faults.log_lines import heard_lines
from tests.faults.ports import dissolve, ports
from tests.faults.sabotage import Harm, Saboteur
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.promises import within_s

SEED = 20_261_125
SHORT = 40
RANKS = 3
TIMEOUTS = Timeouts(connect_s=10.0, join_s=20.0, suspect_s=2.0, lost_s=4.0, collective_s=0.5, drain_s=1.0)
LIMITS = Limits(chunk_bytes=4 * KIB, eager_bytes=2 * KIB, window_bytes=16 * KIB, letter_bytes=0)
GROUPS: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 2))
PATIENCE_S = 550.0
Results = list[list[object]]
Groups = dict[tuple[tuple[int, ...], int], Backend]  # by members and rank


@pytest.mark.parametrize("count", [SHORT, pytest.param(1000, marks=pytest.mark.faults)])
def test_one_broken_chunk_after_the_other(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip, drop, duplicate and truncate one chunk each in turn, somewhere in a step. The step fails with our errors, or its results are
    right to the bit on every rank; without errors the chunk was a duplicate. A new mesh does a failed step again."""
    saboteur = Saboteur(monkeypatch, SEED)
    with heard_lines(), scenario("flipped, dropped, duplicated, truncated chunks", SEED, kept=count > SHORT) as figures:
        LoopThread.shared().run(_train(saboteur, count, figures)).result(PATIENCE_S)
        assert (figures.repeats, figures.measured["caught"]) == (count, count)
        assert figures.parameters_equal


async def _train(saboteur: Saboteur, count: int, figures: Scenario) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    parameters, alone, caught = [torch.zeros(1000) for _ in range(RANKS)], torch.zeros(1000), 0
    kept = list[Groups]()
    async with ports(RANKS, timeouts=TIMEOUTS, limits=LIMITS) as pool:
        ranks = await pool.form()
        for number in range(count):
            harm = list(Harm)[number % len(Harm)]
            saboteur.break_one(harm, after=rng.randrange(30))
            while not saboteur.has_fired:
                stale = sum(rank.telemetry.stale_chunks for rank in ranks)
                seed = rng.randrange(10**6)
                started_s = time.monotonic()
                results = await _step(ranks, seed, parameters, kept)
                errors = [result for each in results for result in each if isinstance(result, BaseException)]
            took_s = time.monotonic() - started_s
            assert all(isinstance(error, ShardnetError) for error in errors), errors
            stale = sum(rank.telemetry.stale_chunks for rank in ranks) - stale
            caught += bool(errors) or (harm is Harm.DUPLICATE and stale > 0)
            assert took_s <= TIMEOUTS.collective_s + within_s(0.5, room=3.0)
            outcomes[f"{harm}: {type(errors[0]).__name__ if errors else 'stale' if stale else 'unnoticed'}"] += 1
            if errors:
                figures.detected_s.append(took_s)
                kept.clear()
                await dissolve(ranks)
                ranks = await pool.form()
                _give(ranks, replace(TIMEOUTS, collective_s=10.0))  # nothing is broken now, and a busy machine may need longer
                results = await _step(ranks, seed, parameters, kept)
                _give(ranks, TIMEOUTS)
            sums = [each[-1] for each in results]
            for rank, total in enumerate(sums):
                assert isinstance(total, torch.Tensor), total
                parameters[rank] = parameters[rank] + total / 8
            alone = alone + _summed([alone] * RANKS) / 8
            figures.repeats += 1
        await dissolve(ranks)
    figures.parameters_equal = all(same_bits(each, alone) for each in parameters)
    figures.measured["caught"] = caught
    print(dict(sorted(outcomes.items())))


def _give(ranks: Sequence[ClusterBackend], timeouts: Timeouts) -> None:
    for rank in ranks:
        rank._timeouts = timeouts


async def _step(ranks: Sequence[ClusterBackend], seed: int, parameters: Sequence[torch.Tensor], kept: list[Groups]) -> Results:
    """Run four collectives at once, the last of which sums gradients, and a barrier of each group, which may have no other collective.
    Return each rank's results or errors; results are checked. `kept` keeps the groups: nobody waits for the word that one is over."""
    rng = random.Random(seed)
    program = [random_step(rng, GROUPS, rows=3000) for _ in range(3)]
    inputs = [inputs_of(step, seed) for step in program]
    groups: Groups = {(members, rank): ranks[rank].subgroup(members) for members in GROUPS for rank in members}
    kept.append(groups)

    async def run(rank: int) -> list[object]:
        handles, wanted = [], list[torch.Tensor | None]()
        for step, each in zip(program, inputs, strict=True):
            if rank in step.members:
                local = step.members.index(rank)
                started = start(step, groups[step.members, rank], each[local])
                handles += started
                wanted += [None] * (len(started) - 1) + [expected(step, each)[local]]
        handles += [groups[members, rank].barrier() for members in GROUPS if rank in members]
        wanted += [None] * (len(handles) - len(wanted))
        handles.append(ranks[rank].all_reduce(_gradient(parameters[rank], rank)))
        wanted.append(_summed(parameters))
        results = await asyncio.gather(*handles, return_exceptions=True)
        for result, right in zip(results, wanted, strict=True):
            assert right is None or isinstance(result, BaseException) or same_bits(result, right), "a wrong byte in a result"
        return results

    return await asyncio.gather(*map(run, range(len(ranks))))


def _gradient(parameters: torch.Tensor, rank: int) -> torch.Tensor:
    """A gradient of whole numbers, so that sums are exact in any order."""
    return (parameters.floor() + torch.arange(len(parameters)) + rank) % 5


def _summed(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_gradient(each, rank) for rank, each in enumerate(parameters)]).sum(0)


@pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.faults)])
async def test_checksums_cost_little_of_a_step(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share only the network: the sender of a byte computes its checksum once, and so does the receiver. The share of a step's
    processor time is measured only where nothing else runs."""
    spent_ns, summed_bytes = [], 0

    def watched(data: bytes | memoryview, value: int = 0) -> int:
        nonlocal summed_bytes
        started_ns = time.thread_time_ns()
        value = crc32c(data, value)
        spent_ns.append(time.thread_time_ns() - started_ns)
        summed_bytes += len(data)
        return value

    async def train(rank: Backend) -> int:
        batch = token_batches(1, 4)[0]
        async with AsyncFSDP(make_gpt(width=240, layers=4), rank, units=[Block]) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(6):
                if step == 1:  # the first step makes buffers
                    spent_ns.clear()
                    started_ns = time.process_time_ns()
                await model.backward(await model.run(loss_of, model.fsdp, batch))
                await model.step(optimizer)
                optimizer.zero_grad()
            return time.process_time_ns() - started_ns

    monkeypatch.setattr(wire, "crc32c", watched)
    with scenario("checksums in a training step", SEED, kept=timed) as figures:
        async with local_cluster(2, ranks_per_node=1) as ranks:
            took_ns = max(await each_rank(ranks, train))  # both ranks together, in one process
            sent_bytes = sum(rank.telemetry.bytes_sent for rank in ranks)
        assert 2 * sent_bytes <= summed_bytes <= 2.01 * sent_bytes
        figures.measured["crc_share"] = sum(spent_ns) / took_ns
        assert not timed or figures.measured["crc_share"] <= 0.05
