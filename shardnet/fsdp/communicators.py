"""The groups of ranks that a sharded model talks to."""

from typing import TypeVar

from shardnet.backend import Backend, Pending
from shardnet.fsdp.timeline import Timeline

T = TypeVar("T")


class Communicators:
    """Who holds the shards of one model. Lives as long as the wrapped model; the backend belongs to the caller.

    [Note: two streams] Gathers and reductions are numbered separately, each in a group of its own. Gathers follow the
    order in which units are used, reductions the order of [Note: reduction queue]. So a gradient that comes earlier
    on one rank than on another, as where a parameter is unused on some ranks, cannot put a reduction before a gather
    on one rank and after it on another. And the user's own collectives, which may come from another thread meanwhile,
    are numbered apart from both.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        everyone = range(backend.world_size)
        self.gathers = backend.subgroup(everyone)
        self.reductions = backend.subgroup(everyone)
        self.timeline = Timeline(backend.telemetry)

    @property
    def rank(self) -> int:
        return self.backend.rank

    @property
    def world_size(self) -> int:
        return self.backend.world_size

    def wait(self, pending: Pending[T], name: str) -> T:
        """The result of a collective; the time spent blocked counts as exposed."""
        return self.timeline.wait(pending, name)
