"""`shardnet.v1.Rendezvous` over a `Registry`.

[Note: the lease] A worker's open Join call is its lease: whatever ends the call (the worker's end, a cut network, a
missed keepalive) ends the membership, and nothing else has to be sent or timed. A Leave before that makes it a goodbye, and a Fail says
what has failed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from shardnet.errors import JoinRefused
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.printable import printable
from shardnet.rendezvous import messages
from shardnet.rendezvous.events import Assigned, JobState, Notice
from shardnet.rendezvous.mailbox import Mailbox
from shardnet.rendezvous.membership import Registry
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.status import refuse
from shardnet.transport.admission import caller
from shardnet.transport.handlers import Context, stream, unary
from shardnet.transport.throttle import Throttle

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class RendezvousService:
    """The gRPC face of one registry; lives as long as its server. It runs on one loop, so nothing needs a lock."""

    def __init__(
        self, registry: Registry, return_s: float, clock: Clock = time.monotonic, on_done: Callable[[], None] | None = None
    ) -> None:
        """`return_s`: how long a job waits for its workers if no connection to any of them is left. `on_done`: called when the registry is
        done (`Registry.is_done`), maybe more than once."""
        self._registry = registry
        self._return_s = return_s
        self._on_done = on_done
        self._clock = clock
        self._mailboxes: dict[str, Mailbox] = {}  # by incarnation, of every open Join call
        self._changed = asyncio.Event()  # the registry's deadline may have changed
        self._closing = False
        self._refused = Throttle(log)

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            messages.SERVICE,
            {
                "Join": stream(pb.JoinRequest, self._join),
                "Leave": unary(pb.LeaveRequest, self._leave),
                "Fail": unary(pb.FailRequest, self._fail),
                "Status": unary(pb.StatusRequest, self._status),
            },
        )

    async def keep_time(self) -> None:
        """Tick the registry whenever it has something to do. Runs until it is cancelled."""
        while True:
            self._changed.clear()
            deadline = self._registry.deadline()
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                now = self._clock()
                jobs = set[str]()
                for incarnation, why in self._registry.late(now).items():
                    job = self._registry.job_of(incarnation) or ""
                    log.info("job %s: %s is gone: %s", job, self._registry.address(job, incarnation), why)
                    jobs.add(job)
                self._deliver(self._registry.tick(now))
                for job in jobs:
                    self._log_end(job)

    def close(self) -> None:
        """End all leases. Members are not told that others vanish: it is the rendezvous that goes, not they."""
        self._closing = True
        for mailbox in self._mailboxes.values():
            mailbox.close()

    async def _join(self, message: pb.JoinRequest, context: Context[pb.MembershipEvent]) -> None:
        if self._closing:
            await _say_closing(context)
        who = context.peer()  # a name of our own front door; better than nothing until the request can be read
        try:
            request = messages.read_request(message)
            who = f"{request.address} on node {request.node}"
            request = _identified(request)
            notices = self._registry.resume(request) if request.resumes else self._registry.join(request, self._clock())
        except JoinRefused as refusal:
            self._refused.warning("refused %s: %s", who, refusal)
            await refuse(context, refusal)
        log.info("job %s: %s %s from node %s", request.job, request.address, "is back" if request.resumes else "joined", request.node)
        mailbox = self._mailboxes[request.incarnation] = Mailbox()
        try:
            self._deliver(notices)
            while (event := await mailbox.take()) is not None:
                await context.write(messages.write_event(event))
        finally:
            del self._mailboxes[request.incarnation]
            # while closing, the call's end says nothing about the worker: it is the rendezvous that goes
            if not self._closing and self._registry.is_member(request.incarnation):
                self._deliver(self._registry.disconnect(request.incarnation, self._clock() + self._return_s))
                if self._registry.is_member(request.incarnation):
                    log.info(
                        "job %s: %s vanished, and no other worker is connected; they have %g s to come back",
                        *(request.job, request.address, self._return_s),
                    )
                else:
                    log.info("job %s: %s vanished", request.job, request.address)
                    self._log_end(request.job)
        if self._closing:
            await _say_closing(context)

    async def _leave(self, message: pb.LeaveRequest, context: Context[pb.LeaveReply]) -> pb.LeaveReply:
        await self._end(message, context, self._registry.leave, "left")
        return pb.LeaveReply()

    async def _fail(self, message: pb.FailRequest, context: Context[pb.FailReply]) -> pb.FailReply:
        why = printable(message.why)
        await self._end(message, context, partial(self._registry.fail, why=why, follows=message.follows), f"is gone: {why}")
        return pb.FailReply()

    async def _end(
        self, message: pb.LeaveRequest | pb.FailRequest, context: Context[Any], end: Callable[[str, str], list[Notice]], how: str
    ) -> None:
        """End a membership at the member's own word; `how` is for the log."""
        identity, joined = caller(), self._registry.identity(message.incarnation)
        if identity is not None and joined not in (None, identity.uri):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{identity} is not the worker that joined with this incarnation")
        address = self._registry.address(message.job, message.incarnation)
        notices = end(message.job, message.incarnation)
        if address is not None:
            log.info("job %s: %s %s", message.job, address, how)
        self._deliver(notices)
        if address is not None:
            self._log_end(message.job)
        if (mailbox := self._mailboxes.get(message.incarnation)) is not None:
            mailbox.close()

    async def _status(self, message: pb.StatusRequest, _: Context[pb.StatusReply]) -> pb.StatusReply:
        return pb.StatusReply(jobs=[messages.write_status(job) for job in self._registry.status(message.job)])

    def _deliver(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            if isinstance(notice.event, Assigned) and notice.event.topology.rank == 0:
                world, job = notice.event.topology, self._registry.job_of(notice.to)
                workers, nodes = _counted(world.world_size, "worker"), _counted(world.node_count, "node")
                log.info("job %s: epoch %d has begun, with %s on %s", job, world.epoch, workers, nodes)
            if (mailbox := self._mailboxes.get(notice.to)) is not None:
                mailbox.put(notice.event)
        if self._on_done is not None and self._registry.is_done:
            self._on_done()
        self._changed.set()

    def _log_end(self, name: str) -> None:
        """A worker has gone: say so if it was the last one of a job that ever ran."""
        for job in self._registry.status(name):
            if job.state is JobState.FINISHED:
                log.info("job %s: finished, in epoch %d", name, job.epoch)
            elif job.state is JobState.LOST:
                log.info(
                    "job %s: lost in epoch %d: no worker is left, and none had said that the training was over; %s",
                    name,
                    job.epoch,
                    job.first_lost,
                )


def _identified(request: JoinRequest) -> JoinRequest:
    """The request with the identity from the caller's certificate, which the caller cannot choose. Raises JoinRefused if the certificate
    does not allow the request."""
    identity = caller()
    if identity is None:
        return request
    if not identity.may_join(request.job):
        raise JoinRefused(
            f"a certificate for {identity} does not let its holder join job {request.job!r}; issue one that does "
            f"(shardnet certs issue --job), or join the job that it is for",
            Refusal.IDENTITY,
        )
    return replace(request, identity=identity.uri)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


async def _say_closing(context: Context[pb.MembershipEvent]) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the rendezvous is shutting down")
