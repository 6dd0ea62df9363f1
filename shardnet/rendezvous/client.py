"""A worker's side of the rendezvous: join, stay, leave."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import JoinRefused, ShardnetError, StateError
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.rendezvous import messages
from shardnet.rendezvous.backoff import delays
from shardnet.rendezvous.events import JobStatus, Joiners, Lost
from shardnet.rendezvous.joining import Joining, OnWaiting
from shardnet.rendezvous.lease import Lease, LeaseBroken
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.tasks import end_task
from shardnet.topology import Topology
from shardnet.transport.observe import ANSWER_S, ask
from shardnet.transport.options import channel_options

log = logging.getLogger(__name__)

# The longest pause between tries to return to a rendezvous that was gone: nobody can join before its members are back. The channel waits up
# to 1.2 s between its own tries, and the two pauses add up.
RETURN_S = 0.5
AWAY_S = 3.0  # how long the rendezvous is away before that is worth a warning: a load balancer may end each connection after some time
_FAIL_S = 0.5  # how long a process that ends by an error waits for the rendezvous to hear why
OnLost = Callable[[int, str, bool], None]  # (rank, reason, left): a member is gone; left: it said goodbye


def join(
    address: str,
    request: JoinRequest,
    *,
    timeouts: Timeouts | None = None,
    on_lost: OnLost | None = None,
    on_waiting: OnWaiting | None = None,
    security: Security | None = None,
) -> "Membership":
    """Make a membership to enter: `async with join("10.0.0.1:7000", request) as membership: membership.topology`.

    address     host:port of the rendezvous
    on_lost     called on the loop for each member that leaves or vanishes once the world is formed; must not block
    on_waiting  called on the loop while the world forms, at every change; must not block

    Entering waits until the world is complete and raises
    - RendezvousUnavailable when nobody answers at the address for `connect_s`,
    - JoinTimeout when too few workers came within `join_s`,
    - JoinRefused when the rendezvous refuses, saying why,
    - HandshakeError when the rendezvous and this process do not trust each other, saying why,
    - ProtocolError when somebody else answers.
    Cancelling it frees the place.

    To form the next epoch of an elastic job all members join again, each with a new incarnation and its old one as `previous`, and
    end the old membership with `abort` after that: see [Note: reforming] in job.py.
    """
    return Membership(address, request, timeouts or Timeouts(), on_lost, on_waiting, security or Security())


class Membership:
    """One worker's membership of one epoch; an async context manager, made by `join`.

    Leaving the context says goodbye. Leaving it by an exception, or `abort`, does not: the others then see this worker
    as lost, as they should see a failed worker. If the rendezvous dies the membership stays and the run goes on. Only the news about
    others stop until the rendezvous is back and takes this worker back as the member that it is. One warning says so if that takes longer
    than AWAY_S.
    """

    def __init__(
        self,
        address: str,
        request: JoinRequest,
        timeouts: Timeouts,
        on_lost: OnLost | None,
        on_waiting: OnWaiting | None,
        security: Security,
    ) -> None:
        self._address = address
        self._request = request
        self._timeouts = timeouts
        self._on_lost = on_lost
        self._on_waiting = on_waiting
        self._security = security
        self._channel: grpc.aio.Channel | None = None
        self._lease: Lease | None = None
        self._watch: asyncio.Task[None] | None = None  # owned: awaited by _close
        self._topology: Topology | None = None
        self._superseded = False
        self._leaving = False  # if true, the lease ends because this worker wants it
        self._joiners = Joiners(0)
        self._away = False  # the rendezvous cannot be reached, or does not know this membership
        self._warned = False  # that it is away now

    @property
    def topology(self) -> Topology:
        """The places of all members, and of this worker; the members of the epoch as it was formed."""
        if self._topology is None:
            raise StateError("the world is not formed yet: enter the membership first (async with join(...))")
        return self._topology

    @property
    def joiners(self) -> int:
        """How many workers would come in if all members of an elastic job joined again now, as far as this worker knows. Any thread."""
        return self._joiners.count

    @property
    def spares(self) -> int:
        """How many workers wait for a place in an elastic job that is full, as far as this worker knows. Any thread."""
        return self._joiners.spares

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise StateError("a membership can be entered only once; call join() again with a new incarnation")
        self._channel = self._security.channel(self._address, channel_options(self._timeouts, Limits()), to=Role.RENDEZVOUS)
        joining = Joining(self._channel, self._address, self._request, self._timeouts, self._on_waiting, self._security)
        try:
            self._lease, self._topology = await joining.run()
        except BaseException:
            await self._channel.close()
            raise
        self._watch = asyncio.create_task(self._watch_others(self._lease), name=f"membership of rank {self._topology.rank}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.abort()
        await self.aclose()

    async def aclose(self) -> None:
        """Say goodbye and close. Safe to call twice; cancelling it skips the goodbye."""
        try:
            if self._watch is not None and not self._away and not self._leaving:
                self._leaving = True
                leave = pb.LeaveRequest(job=self._request.job, incarnation=self._request.incarnation)
                await self._tell("Leave", leave, self._timeouts.drain_s)
        finally:
            await self._close()

    def supersede(self) -> None:
        """This worker asks for its next membership: if this one's lease breaks from now on, it does not come back to the rendezvous, which
        may know only the next one. The lease stays until then. Any thread."""
        self._superseded = True

    async def fail(self, why: str, *, follows: bool = False) -> None:
        """Give the membership up, and tell the rendezvous why, if it hears that at once; `aclose` must still follow. `follows`: it follows
        from the end of another member."""
        try:
            if self._watch is not None and not self._away and not self._leaving:
                self._leaving = True
                job, incarnation = self._request.job, self._request.incarnation
                await self._tell("Fail", pb.FailRequest(job=job, incarnation=incarnation, why=why, follows=follows), _FAIL_S)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give the membership up at once, without a goodbye. Synchronous, on the loop; `aclose` must still follow."""
        self._leaving = True
        if self._lease is not None:
            self._lease.end()

    async def _watch_others(self, first: Lease) -> None:
        """Report members that are gone, and return to the rendezvous when it was gone itself."""
        lease: Lease | None = first
        while lease is not None:
            try:
                await self._listen(lease)
            except (LeaseBroken, ShardnetError) as error:
                if self._leaving or self._superseded:
                    return
                self._away, self._joiners = True, Joiners(0)
                why = str(error)
            try:
                lease = await self._come_back(why)
            except ShardnetError as error:
                if not self._superseded:
                    self._say(
                        logging.WARNING, f"does not take this worker back, and will not tell the others if this worker is lost: {error}"
                    )
                return

    async def _listen(self, lease: Lease) -> None:
        while True:
            event = await lease.next_event()
            if isinstance(event, Lost):
                self._report(event)
            elif isinstance(event, Joiners):
                self._joiners = event

    async def _come_back(self, why: str) -> Lease | None:
        """Return to the rendezvous, as `_try_to_return` does, and warn if that takes long. `why` it is away."""
        self._warned = False
        self._say(logging.INFO, f"is out of reach ({why}); trying to return to it")
        warning = asyncio.get_running_loop().call_later(AWAY_S, self._warn, why)
        try:
            lease = await self._try_to_return()
        finally:
            warning.cancel()
        if lease is not None:
            self._say(logging.WARNING if self._warned else logging.INFO, "is back")
        return lease

    async def _try_to_return(self) -> Lease | None:
        """Try until the rendezvous has taken this worker back, or until this worker asks for its next membership: None. Raises JoinRefused,
        or an error that says that it is no rendezvous now."""
        assert self._channel is not None
        for pause_s in delays(most_s=RETURN_S):
            await asyncio.sleep(pause_s)
            if self._superseded:
                return None
            self._lease = lease = Lease(self._channel, self._address, replace(self._request, resumes=True))
            try:
                event = await lease.next_event()
            except LeaseBroken:
                continue
            except JoinRefused as refusal:
                if refusal.reason == Refusal.DUPLICATE_INCARNATION:  # the rendezvous has not noticed yet that the old connection broke
                    continue
                raise
            self._away = False
            self._joiners = event if isinstance(event, Joiners) else Joiners(0)
            return lease
        raise AssertionError("unreachable: delays() does not end")

    def _warn(self, why: str) -> None:
        self._warned = True
        self._say(logging.WARNING, f"is gone ({why}); the run goes on, but no worker can join and no new epoch can form until it is back")

    def _say(self, level: int, what: str) -> None:
        topology = self.topology
        where = (topology.rank, topology.world_size, topology.epoch)
        log.log(level, "[rank %d/%d epoch %d] the rendezvous at %s %s", *where, self._address, what)

    def _report(self, lost: Lost) -> None:
        if self._on_lost is None or lost.epoch != self.topology.epoch:
            return
        try:
            self._on_lost(lost.rank, lost.reason, lost.left)
        except Exception:
            log.exception("on_lost failed for rank %d", lost.rank)

    async def _tell(self, method: str, message: pb.LeaveRequest | pb.FailRequest, timeout_s: float) -> None:
        """Tell the rendezvous how this membership ends, if it can be reached."""
        assert self._channel is not None
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{messages.SERVICE}/{method}")
        try:
            await call(message.SerializeToString(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.info("the rendezvous at %s does not hear why this worker goes: %s", self._address, error.code().name)

    async def _close(self) -> None:
        watch, self._watch = self._watch, None
        try:
            self.abort()
            if watch is not None:
                await end_task(watch)
        finally:
            if self._channel is not None:
                await self._channel.close()


async def status(address: str, job: str = "", *, timeout_s: float = ANSWER_S, security: Security | None = None) -> tuple[JobStatus, ...]:
    """The jobs of the rendezvous at `address`, or only `job`. Raises EndpointUnavailable, HandshakeError, or ProtocolError
    if something else answers."""
    method = f"/{messages.SERVICE}/Status"
    reply = await ask(
        address, method, pb.StatusRequest(job=job), pb.StatusReply.FromString, timeout_s=timeout_s, security=security, to=Role.RENDEZVOUS
    )
    return tuple(messages.read_status(j) for j in reply.jobs)
