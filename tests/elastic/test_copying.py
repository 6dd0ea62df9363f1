"""When a commit may say that a step is committed."""

import asyncio

import pytest
import torch

from shardnet.elastic.copying import Copying
from shardnet.elastic.generation import Generation, Mark
from shardnet.errors import PeerLost
from shardnet.testing import loopback_cluster


@pytest.mark.parametrize(("spread", "complete"), [(True, [False, True, False, False]), (False, [True, True, True, False])])
async def test_nobody_is_through_before_all_have_written(spread: bool, complete: list[bool]) -> None:
    """Rank 3 of four dies before it has sent its copy or, if each rank has the whole state and sends nothing, before it counts its step as
    complete. Rank 1, which has no part in that exchange, must not take the step for committed."""
    async with loopback_cluster(4) as backends:
        generations = [Generation(Mark(1, 1)) for _ in backends]
        for rank, generation in enumerate(generations):
            generation.spread.take([("weight", rank, rank + 1, {"parameter": torch.ones(1)})] if spread else [])
            generation.local.take({})
        commits = [
            asyncio.create_task(Copying(backend, []).commit(generation, 0, 0, is_saving=False))
            for backend, generation in zip(backends[:3], generations[:3], strict=True)
        ]
        sizes = [generations[3].spread.header.numel(), generations[3].spread.payload.numel(), 0, 0, 0]
        await backends[3].all_gather(torch.tensor([sizes]), label="commit of step 1")  # and then nothing more
        while not commits[1].done() and backends[1].telemetry.flights.last(1)[0].op != "barrier":  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0)
        assert generations[1].complete or commits[1].done()
        backends[3].abort()
        for commit in commits:
            with pytest.raises(PeerLost):
                await commit
        assert [generation.complete for generation in generations] == complete
