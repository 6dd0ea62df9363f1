"""`Gathering`: the doctors that have met at the rendezvous."""

import asyncio
import math
from types import TracebackType
from typing import Self

from shardnet.doctor.finding import Finding, problem
from shardnet.doctor.ports import DIAL_S, Port, about_port, name, place, try_ports
from shardnet.errors import StateError
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import Membership, join
from shardnet.rendezvous.identity import new_incarnation, node_identity
from shardnet.rendezvous.request import JoinRequest
from shardnet.settings import Settings
from shardnet.topology import Topology
from shardnet.training.seat import begin_membership, end_membership

STAY_S = DIAL_S + 1.0  # after they have met; another doctor may hear of that later than this one
_MOST_NAMES = 4  # in one message about ports that are closed
_LET_IN = "connections from there must be let in here: see the doctor there for the reason, and this machine's firewall and --listen"
_ELSEWHERE = "see the doctor there for the reason; speeds can be measured only when all machines reach each other"


class Apart(Exception):
    """The doctors do not all reach each other, so they can form no mesh."""


class Gathering:
    """One doctor's membership of the round of doctors that measure each other. Entered before they meet; leaving it ends the membership.

    Doctors that do not reach each other's ports all reach the rendezvous. So one that finds a closed port tells the rendezvous why it
    gives up, and the rendezvous tells the others.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.security = settings.security()
        self._membership: Membership | None = None
        self._ports: dict[int, Port] = {}
        self._news: dict[int, str] = {}  # of doctors that have given up or were lost, by rank
        self._stays_until_s = -math.inf  # of the loop's time

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._membership is not None:
            await end_membership(self._membership, goodbye=error is None)

    @property
    def topology(self) -> Topology:
        if self._membership is None:
            raise StateError("the doctors have not met yet")
        return self._membership.topology

    async def meet(self, address: str, _: str) -> Topology:
        """Wait for the others, and try their ports; see `Meet` in station.py. Raises Apart, and a RendezvousError if they do not meet."""
        settings = self._settings
        request = JoinRequest(
            job=settings.job,
            incarnation=new_incarnation(),
            address=address,
            node=node_identity(settings.node),
            min_world_size=settings.min_world_size,
            max_world_size=settings.max_world_size,
            local_rank_hint=settings.local_rank,
        )
        membership = join(settings.rendezvous, request, timeouts=settings.timeouts, on_lost=self._hear, security=self.security)
        await begin_membership(membership)
        self._membership = membership
        self._stays_until_s = asyncio.get_running_loop().time() + STAY_S
        self._ports = await try_ports(membership.topology, self.security)
        if closed := [name(membership.topology.members[rank]) for rank, port in self._ports.items() if port.problem]:
            more = f" and {len(closed) - _MOST_NAMES} others" if len(closed) > _MOST_NAMES else ""
            await LoopThread.shared().run_here(membership.fail(f"it cannot reach {', '.join(closed[:_MOST_NAMES])}{more}"))
        if closed or self._news:
            raise Apart
        return membership.topology

    def _hear(self, rank: int, reason: str, left: bool) -> None:
        if not left:
            self._news[rank] = reason

    async def stay(self) -> None:
        """Go on listening until the others have tried this doctor's port, and hear what they tell."""
        await asyncio.sleep(self._stays_until_s - asyncio.get_running_loop().time())

    @property
    def is_whole(self) -> bool:
        """Whether all doctors have reached each other and none is lost, as far as this one knows."""
        return not self._news and not any(port.problem for port in self._ports.values())

    def about_ports(self, measured: dict[int, Finding]) -> list[Finding]:
        """What is known of each other doctor; `measured` are findings that say more, by rank."""
        topology = self.topology
        return [measured.get(rank) or about_port(topology.members[rank], topology, port) for rank, port in sorted(self._ports.items())]

    def about_others(self) -> list[Finding]:
        """What other doctors have told about each other, or about this one."""
        topology, found = self.topology, []
        own = name(topology.me)
        for rank, reason in sorted(self._news.items()):
            told = reason.replace(own, f"this machine ({topology.me.address})")
            found.append(problem("peers", f"{place(topology.members[rank], topology)}: {told}", _LET_IN if own in reason else _ELSEWHERE))
        return found
