"""The figures of all ranks, on every rank. Numbers travel as JSON; nothing that is received is executed."""

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.performance.figures import TrainingFigures
from shardnet.performance.zero3 import Zero3PerformanceStats


async def cluster_figures(backend: Backend, mine: TrainingFigures) -> TrainingFigures:
    """The cluster's figures. A collective: every rank gives its own, after the same step, and gets the same back.

    Raises UsageError on all ranks if they have measured different numbers of steps.
    """
    gathered = await gather_json(backend, mine.to_json(), "training figures")
    return TrainingFigures.merge(map(TrainingFigures.from_json, gathered))


async def cluster_stats(backend: Backend, mine: Zero3PerformanceStats) -> Zero3PerformanceStats:
    """The counters of all ranks, merged. A collective: every rank gives its own and gets the same back."""
    merged = Zero3PerformanceStats()
    for each in await gather_json(backend, mine.to_json(), "performance statistics"):
        merged.merge(Zero3PerformanceStats.from_json(each))
    return merged
