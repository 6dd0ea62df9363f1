"""`Joining`: how a worker gets its place in a complete world."""

import asyncio
import logging
from collections.abc import Callable
from itertools import count

import grpc

from shardnet.config import Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import JoinRefused, JoinTimeout, RendezvousUnavailable, ShardnetError
from shardnet.rendezvous.backoff import delays
from shardnet.rendezvous.events import Assigned, Ended, Waiting
from shardnet.rendezvous.lease import Lease, LeaseBroken
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Topology
from shardnet.transport.dialing import check_trust
from shardnet.transport.options import HANDSHAKE_S

log = logging.getLogger(__name__)

OnWaiting = Callable[[Waiting], None]
PATIENCE_S = 10.0  # after this time users begin to wonder; the workers of one machine arrive within less
ANSWER_S = 1.0  # the time for an answer that each try should have


class _NoAnswer(LeaseBroken):
    """A try had to end because no time was left."""


class Joining:
    """One worker's tries to join; thrown away once it has a topology.

    The rendezvous may not be up yet, or may go and come back: after a broken lease this tries again, until the
    rendezvous has been silent for `connect_s`. `join_s` bounds the whole. For a worker whose job runs already, or that replaces one of
    such a job, only `join_s` counts: its rendezvous was there, and is likely to come back.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        request: JoinRequest,
        timeouts: Timeouts,
        on_waiting: OnWaiting | None,
        security: Security,
    ) -> None:
        self._channel = channel
        self._security = security
        self._address = address
        self._request = request
        self._timeouts = timeouts
        self._on_waiting = on_waiting
        self._clock = asyncio.get_running_loop().time
        self._silent_since_s = self._clock()
        self._patience_s = timeouts.join_s if request.last_epoch or request.replacement else timeouts.connect_s
        self._waiting: Waiting | None = None  # the newest; None until the rendezvous has taken us in
        self._has_told = False  # what it waits for
        self._most = 0  # the most workers that have waited at a time
        self._refusal: JoinRefused | None = None  # the answer to the last try, if it was one that may pass
        self._pauses = delays()

    async def run(self) -> tuple[Lease, Topology]:
        """Try until there is a place. Raises RendezvousUnavailable, JoinTimeout, JoinRefused, HandshakeError or ProtocolError."""
        notice = asyncio.get_running_loop().call_later(PATIENCE_S, self._say_what_is_missing)
        try:
            async with asyncio.timeout(self._timeouts.join_s):
                return await self._keep_trying()
        except TimeoutError as error:
            if isinstance(error, ShardnetError):
                raise
            raise self._out_of_time() from None
        finally:
            notice.cancel()

    async def _keep_trying(self) -> tuple[Lease, Topology]:
        for tries in count(1):
            begin_s = self._clock()
            try:
                return await self._try()
            except LeaseBroken as broken:
                trouble = str(broken)
                if not (isinstance(broken, _NoAnswer) and self._clock() < begin_s + ANSWER_S):  # otherwise the last answer stands
                    self._refusal = None
                left_s = self._silent_since_s + self._patience_s - self._clock()
                await check_trust(self._address, self._security, min(left_s, HANDSHAKE_S), Role.RENDEZVOUS)
            except JoinRefused as refusal:
                if not self._may_pass(refusal, tries):
                    raise
                trouble, self._refusal = str(refusal), refusal
            pause_s = next(self._pauses)
            if self._clock() + pause_s >= self._silent_since_s + self._patience_s:
                raise self._refusal or self._unavailable(trouble)
            if tries == 1:
                log.info("cannot join the rendezvous at %s yet (%s); trying for %g s", self._address, trouble, self._patience_s)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: count() does not end")

    def _may_pass(self, refusal: JoinRefused, tries: int) -> bool:
        """Whether the refusal is about something that is gone already, but that the rendezvous takes for alive until its keepalive fails:
        this worker's own last lease, or the worker that it replaces in an elastic job. Or about members that have no connection now: they
        are soon given up."""
        if refusal.reason == Refusal.DUPLICATE_INCARNATION:
            return tries > 1
        if refusal.reason == Refusal.ABSENT:
            return True
        return self._request.elastic and refusal.reason in (Refusal.DUPLICATE_WORKER, Refusal.DUPLICATE_ADDRESS)

    async def _try(self) -> tuple[Lease, Topology]:
        """Try one lease, up to the assignment or until the lease breaks."""
        lease = Lease(self._channel, self._address, self._request)
        spoke = False
        try:
            async with asyncio.timeout_at(self._silent_since_s + self._patience_s) as silence:
                while True:
                    event = await lease.next_event()
                    spoke = True
                    silence.reschedule(None)  # from now on only join_s counts, and keepalive finds a frozen rendezvous
                    if isinstance(event, Assigned):
                        return lease, event.topology
                    if isinstance(event, Ended):
                        raise JoinRefused(f"the training of job {self._request.job!r} has ended before this worker's turn", Refusal.ENDED)
                    if isinstance(event, Waiting):
                        self._wait_on(event)
        except BaseException as error:
            lease.end()
            if isinstance(error, TimeoutError) and not isinstance(error, ShardnetError):
                raise _NoAnswer("no answer") from None
            raise
        finally:
            if spoke:  # the rendezvous was there until this moment
                self._silent_since_s, self._pauses = self._clock(), delays()

    def _wait_on(self, waiting: Waiting) -> None:
        before, self._waiting, self._refusal = self._waiting, waiting, None
        self._most = max(self._most, waiting.joined)
        if self._has_told and before is not None and before.is_full and not waiting.is_full:
            self._say_what_is_missing()  # it is no place any more
        if self._on_waiting is not None:
            self._on_waiting(waiting)

    def _say_what_is_missing(self) -> None:
        """Log, from one worker per machine, what is missing: a terminal without news looks like a hang."""
        if self._request.local_rank_hint:
            return
        self._has_told = True
        if self._refusal is not None:
            log.warning(
                "the rendezvous at %s does not take this worker yet (%s); trying for %g s", self._address, self._refusal, self._patience_s
            )
        elif self._waiting is None:
            log.warning("no rendezvous answers at %s yet; trying for %g s", self._address, self._patience_s)
        elif self._waiting.is_running and self._request.last_epoch:  # those of that epoch have the first places in the next one
            log.warning(
                "job %r: waiting up to %g s for others that are still in epoch %d",
                *(self._request.job, self._timeouts.join_s, self._request.last_epoch),
            )
        elif self._waiting.is_full:
            log.warning("job %r has all of its %s workers; this one waits for a place", self._request.job, self._request.wish)
        elif self._waiting.is_running:
            log.warning(
                "job %r is running at %s; waiting up to %g s until it takes this worker in, after a step",
                *(self._request.job, self._address, self._timeouts.join_s),
            )
        else:
            log.warning(
                "job %r: %d of %s workers have joined at %s; waiting up to %g s for the others",
                *(self._request.job, self._waiting.joined, self._request.wish, self._address, self._timeouts.join_s),
            )

    def _unavailable(self, trouble: str) -> RendezvousUnavailable:
        return RendezvousUnavailable(
            f"no rendezvous answered at {self._address} for {self._patience_s:g} s (last: {trouble}); "
            "start it with `shardnet rendezvous`, or check the address and the network between"
        )

    def _out_of_time(self) -> JoinTimeout | JoinRefused | RendezvousUnavailable:
        waiting = self._waiting
        if self._refusal is not None:
            return self._refusal
        if waiting is None:
            return self._unavailable(f"no answer within the join timeout of {self._timeouts.join_s:g} s")
        if waiting.is_full and not (waiting.is_running and self._request.last_epoch):
            return JoinTimeout(
                f"job {self._request.job!r} at {self._address} has all of its {self._request.wish} workers, and no place became free "
                f"within {self._timeouts.join_s:g} s"
            )
        if waiting.is_running:
            return JoinTimeout(
                f"job {self._request.job!r} is running at {self._address}, and its workers did not end their epoch within "
                f"{self._timeouts.join_s:g} s; they do so after the commit of a step, if no checkpoint is being written: "
                f"`shardnet status {self._address}` shows what they do, and a larger join_s waits longer"
            )
        # all that wait give up at about the same time: the last one must not say that it was alone
        joined = self._most if self._most < self._request.min_world_size else waiting.joined
        gone = f" ({joined - waiting.joined} of them had gone again by then)" if joined > waiting.joined else ""
        return JoinTimeout(
            f"job {self._request.job!r}: only {joined} of {self._request.wish} workers joined at {self._address} within "
            f"{self._timeouts.join_s:g} s{gone}; start the missing ones (the log of the rendezvous names those that it has refused), "
            "or allow fewer with min_world_size"
        )
