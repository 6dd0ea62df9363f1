"""`Observer`: asks a rendezvous and all its workers, or one worker, how they are."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.observation.replies import read_stats
from shardnet.observation.views import GONE, RENDEZVOUS, UNREACHABLE, UNTRUSTED, ClusterView, JobView, Stats, WorkerView
from shardnet.pb import stats_pb2
from shardnet.rendezvous import client
from shardnet.rendezvous.events import JobStatus
from shardnet.transport.observe import Health, snapshot

Ask = Callable[[str], Awaitable[stats_pb2.SnapshotReply]]


class Observer:
    """Asks all processes at once; a process that does not answer within `timeout_s` counts as unreachable.

    ask  the function that gets the statistics of a process; raises like `snapshot`. Repeated looks use that of a `Follower`
    """

    def __init__(self, security: Security, timeout_s: float, ask: Ask | None = None) -> None:
        self._security = security
        self._timeout_s = timeout_s
        self._ask = ask or partial(snapshot, timeout_s=timeout_s, security=security)

    async def look(self, address: str) -> ClusterView:
        """The process at `address` and all workers that it names. Raises EndpointUnavailable, HandshakeError or ProtocolError only for the
        process itself."""
        stats, state = await self._see(address)
        if stats.role != RENDEZVOUS:
            return ClusterView(address, state, stats)
        statuses = await client.status(address, timeout_s=self._timeout_s, security=self._security)
        return ClusterView(address, state, stats, tuple(await asyncio.gather(*map(self._job, statuses))))

    async def look_again(self, view: ClusterView) -> ClusterView:
        """The workers of an earlier look, for when the process that named them no longer answers."""

        async def again(job: JobView) -> JobView:
            asked = await asyncio.gather(*(self._worker(each.rank, each.node, each.address) for each in job.workers if each.state != GONE))
            return replace(job, workers=(*asked, *(each for each in job.workers if each.state == GONE)))

        return replace(view, health=UNREACHABLE, jobs=tuple(await asyncio.gather(*map(again, view.jobs))))

    async def _job(self, status: JobStatus) -> JobView:
        members = await asyncio.gather(*(self._worker(member.rank, member.node, member.address) for member in status.members))
        workers = sorted([*members, *_gone(members)], key=lambda worker: worker.rank)
        return JobView(
            *(status.job, status.state, status.epoch, status.joined, status.min_world_size, status.max_world_size),
            workers=tuple(workers),
            absent=status.absent,
            first_lost=status.first_lost,
        )

    async def _worker(self, rank: int, node: str, address: str) -> WorkerView:
        try:
            stats, state = await self._see(address)
        except HandshakeError:
            return WorkerView(rank, node, address, UNTRUSTED)
        except (EndpointUnavailable, ProtocolError):
            return WorkerView(rank, node, address, UNREACHABLE)
        return WorkerView(rank, node, address, state, stats)

    async def _see(self, address: str) -> tuple[Stats, Health]:
        reply = await self._ask(address)
        return read_stats(reply), Health.SERVING if reply.serving else Health.NOT_SERVING


def _gone(members: list[WorkerView]) -> list[WorkerView]:
    """The ranks that the survivors still know and the rendezvous does not."""
    known = next((member.stats.addresses for member in members if member.stats is not None), ())
    ranks = {member.rank for member in members}
    return [WorkerView(rank, "", address, GONE) for rank, address in enumerate(known) if rank not in ranks]
