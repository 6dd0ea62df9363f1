"""`Job`: the membership of one job, as a pure state machine. No I/O, no clock: time comes in as an argument."""

import math
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace
from typing import Self

from shardnet.errors import JoinRefused
from shardnet.rendezvous.events import Assigned, Ended, JobState, JobStatus, Joiners, Lost, Notice, Waiting
from shardnet.rendezvous.placement import by_wish, place
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import MAX_WORLD_SIZE, JoinRequest, may_share_node
from shardnet.rendezvous.store import SavedJob
from shardnet.topology import Member, Topology

REFORMS = "it forms the next epoch"
MISSED_S = 2.0  # how much later than the others a member that is only slow may notice that a collective has failed


@dataclass(frozen=True, slots=True)
class Loss:
    """A member that went without a goodbye."""

    epoch: int
    member: Member
    reason: str
    follows: bool  # from another one, of which the rendezvous may hear later

    def __str__(self) -> str:
        return f"epoch {self.epoch} lost rank {self.member.rank} ({self.member.address}) first: {self.reason}"


class Job:
    """The workers of one job; lives through all of the job's epochs. `JobState` says which state may follow which.

    Methods that change the job return the notices to deliver, in order; after `readmit`, `greet` returns them.

    [Note: reforming] A running elastic job takes in every worker that joins, as a joiner: live, but without a rank. The job's members hear
    of it. They end the epoch at a moment of their own choice, or when they lose a member: each member joins again, which ends its
    membership and makes it a joiner in one step, so that nobody takes it for gone. When no member is left, the joiners form the
    next epoch. They do so at once if there are enough of them, because any other worker may never come. If there are too many joiners,
    the former members are taken first, and the others stay for the epoch after that.

    [Note: the stuck] A member that hangs in its own code keeps its lease, and the others would wait for it without end. So the members that
    have waited for it in vain in a collective name it when they join again. They also name one that was told to leave, because its goodbye
    may not come: its machine is gone, or it could not reach the rendezvous. When all other members have joined again, it has MISSED_S to
    come, too; after that it is no longer a member. If it wakes up, it joins as a new worker does. Only who was a member of that epoch can
    name others: a worker with the address and the certificate of the membership that it follows. It does not matter whether that
    membership broke in the meantime, or whether the rendezvous was started again.

    [Note: the end] A member of an elastic job that leaves with a goodbye says by this that the training is over, since all members end
    together, also if its last checkpoint failed (EndNotSaved). From then on there is no next epoch: workers that wait for one are told so,
    and so are members that come back because another one died in that very moment. A later worker that replaces a lost one, or that was
    frozen meanwhile, is refused, too; any other later worker begins the job again from the start.
    """

    def __init__(self, name: str, epoch: int, settle_s: float, first_world_size: int = 0) -> None:
        """`epoch` is the last epoch number that is used up; once `min_world_size` workers are there, they wait `settle_s` for more. The
        first epoch has `first_world_size` workers, if that is not 0, whatever the workers ask for."""
        self.name = name
        self.epoch = epoch
        self.state = JobState.FINISHED
        self.ever_ran = False
        self.is_done = False  # its training has ended with goodbyes, and no worker is left
        self._settle_s = settle_s
        self._first_world_size = first_world_size
        self._live: dict[str, JoinRequest] = {}  # by incarnation, in order of arrival
        self._members: dict[str, Member] = {}  # the live workers with ranks; empty unless RUNNING
        self._former_ranks: dict[str, int] = {}  # of joiners that were members
        self._gone: dict[str, tuple[JoinRequest, Member]] = {}  # of this epoch, without a goodbye: vanished, or joined again
        self._missed: set[str] = set()  # see [Note: the stuck]
        self._stuck_since_s: float | None = None  # when the others were seen to wait for nobody else
        self._ended = False  # see [Note: the end]
        self._was_lost = False  # its last epoch was over before the training had ended, and none followed
        self._losses: dict[str, Loss] = {}  # by incarnation, of the last epoch that had any, in the order in which they were heard of
        self._wish: JoinRequest | None = None  # of the worker that started the forming: its sizes hold for all
        self._last_arrival_s = 0.0

    def join(self, request: JoinRequest, now: float, replaces: Collection[str] = ()) -> list[Notice]:
        """Take a worker in, or raise JoinRefused and change nothing. `replaces`: members that will be removed, since it has their place."""
        self._check_duplicate(request, self._previous(request), replaces)
        if self.state is JobState.RUNNING and not (request.elastic and self._elastic):
            raise self._too_late()
        if self._ended and (self.state is JobState.RUNNING or request.replacement or request.last_epoch):
            raise JoinRefused(f"the training of job {self.name!r} has ended; nothing is left to do for this worker", Refusal.ENDED)
        if self._live:
            self._check_wish(request)
        else:
            if self._ended:
                self._gone.clear()  # who was in that training's last epoch cannot come back to it: another training begins
            self.state, self._wish, self._ended, self.is_done = JobState.FORMING, request, False, False
        notices = self._leave_epoch(request)
        self._live[request.incarnation] = request
        self._last_arrival_s = now
        self._watch_the_stuck(now)
        return notices + self._welcome(request)

    def _welcome(self, request: JoinRequest) -> list[Notice]:
        """The notices that follow from a new joiner; forms the world if it is complete now."""
        if self.state is JobState.RUNNING and self._members:
            return [*self._tell_waiting([request.incarnation]), *self._tell_joiners()]
        if self.state is JobState.RUNNING:
            return self._reform()
        enough = request.max_world_size if self.ever_ran else self._first_world_size or request.max_world_size
        return self._form() if len(self._live) >= enough else self._tell_waiting()

    def remove(self, incarnation: str, reason: str, *, left: bool, follows: bool = False) -> list[Notice]:
        """A worker left or vanished: a joiner's place is free again; if it was a member, the others are told. `follows`: it went because
        another one had gone."""
        request = self._live.pop(incarnation)
        self._former_ranks.pop(incarnation, None)
        member = self._members.pop(incarnation, None)
        self._watch_the_stuck()
        notices: list[Notice] = []
        if member is not None and not left:
            self._gone[incarnation] = (request, member)
            self._losses = {name: loss for name, loss in self._losses.items() if loss.epoch == self.epoch}
            self._losses[incarnation] = Loss(self.epoch, member, reason, follows)
        elif member is not None and self._elastic:
            notices += self._end()
        if not self._live:
            self.state, self.is_done = JobState.FINISHED, self._ended or (left and member is not None)
            if member is not None:
                self._was_lost = not self.is_done
            self._former_ranks.clear()
            return notices
        if self.state is JobState.FORMING:
            return self._tell_waiting()
        if member is not None:
            notices += self._tell_lost(member, reason, left=left)
        return notices + (self._tell_joiners() if self._members else self._reform())

    def readmit(self, request: JoinRequest) -> bool:
        """Take back a member that had only lost its connection, if its epoch still runs. Raises JoinRefused if another live worker has its
        place. That may be the same worker: this request was under way when it joined again. It would then be a joiner, and the member
        that all joiners wait for."""
        found = self._gone.get(request.incarnation)
        if found is None or not _is_same(found[0], request) or self.state is JobState.FORMING:
            return False
        self._check_duplicate(request, None)
        del self._gone[request.incarnation]
        self._losses.pop(request.incarnation, None)
        self._live[request.incarnation], self._members[request.incarnation] = found
        self.state = JobState.RUNNING
        self._watch_the_stuck()
        return True

    def assigned(self, incarnation: str) -> list[Notice]:
        """Once more the notices for a member that asks for its place because it has not heard of it. Empty if its epoch is not whole any
        more."""
        members = sorted((*self._members.values(), *(member for _, member in self._gone.values())), key=lambda member: member.rank)
        if [member.rank for member in members] != list(range(len(members))):
            return []
        topology = Topology(self.epoch, self._members[incarnation].rank, tuple(members))
        return [Notice(incarnation, Assigned(topology)), *self.greet(incarnation)]

    def greet(self, incarnation: str) -> list[Notice]:
        """The notices for a member that is back, and for the others."""
        return self._tell_joiners() if self._elastic else [Notice(incarnation, Joiners(0))]

    @property
    def saved(self) -> SavedJob | None:
        """The data needed to go on with the running epoch, or with the next one; None for a job that never ran."""
        if not self.ever_ran or self._wish is None:
            return None
        wish = self._wish
        members = tuple((member.rank, self._live[incarnation]) for incarnation, member in self._members.items())
        gone = tuple((member.rank, request) for request, member in self._gone.values())
        return SavedJob(self.name, self.epoch, wish.min_world_size, wish.max_world_size, wish.elastic, self._ended, members, gone)

    @classmethod
    def restored(cls, saved: SavedJob, settle_s: float) -> Self:
        """A job as it was saved, with all of its members live. Ranks that had said goodbye by then belong to no worker."""
        job = cls(saved.name, saved.epoch, settle_s)
        job.ever_ran, job._ended = True, saved.ended
        by_rank = sorted((*saved.members, *saved.gone), key=lambda each: each[0])
        placed = place([request for _, request in by_rank])
        members = {m.incarnation: replace(m, rank=rank) for m, (rank, _) in zip(placed, by_rank, strict=True)}
        job._gone = {request.incarnation: (request, members.pop(request.incarnation)) for _, request in saved.gone}
        job._members, job._live = members, {request.incarnation: request for _, request in saved.members}
        if by_rank:
            job._wish = by_rank[0][1]
        if members:
            job.state = JobState.RUNNING
        job._was_lost = saved.elastic and not saved.ended and bool(by_rank)  # unless it goes on: as in `_reform`
        return job

    def _end(self) -> list[Notice]:
        """End the job for its joiners: see [Note: the end]. The joiners that are told so no longer belong to this job."""
        self._ended = True
        joiners = [request.incarnation for request in self.joiners]
        for incarnation in joiners:
            del self._live[incarnation]
        self._former_ranks.clear()
        return [Notice(incarnation, Ended()) for incarnation in joiners]

    def _leave_epoch(self, request: JoinRequest) -> list[Notice]:
        """A member becomes a joiner; see [Note: reforming]. A worker that is a joiner already, or whose membership or joining has broken,
        keeps its former rank."""
        notices: list[Notice] = []
        if (previous := self._previous(request)) is not None:
            del self._live[previous.incarnation]
            if (rank := self._former_ranks.pop(previous.incarnation, None)) is not None:
                self._former_ranks[request.incarnation] = rank
            if (member := self._members.pop(previous.incarnation, None)) is not None:
                self._gone[previous.incarnation] = previous, member
                notices = self._tell_lost(member, REFORMS, left=True)
        gone = self._gone.get(request.previous)
        if gone is not None and _is_same(gone[0], request):
            self._former_ranks[request.incarnation] = gone[1].rank
            if request.last_epoch == self.epoch:
                epoch = (*self._members.values(), *(member for _, member in self._gone.values()))  # who has vanished may come back
                self._missed |= {member.incarnation for member in epoch if member.rank in request.missing}
        return notices

    def _previous(self, request: JoinRequest) -> JoinRequest | None:
        """The live membership that a request follows. A worker cannot end another worker's membership by naming it."""
        previous = self._live.get(request.previous)
        return previous if previous is not None and _is_same(previous, request) else None

    @property
    def _elastic(self) -> bool:
        return self._wish is not None and self._wish.elastic

    @property
    def joiners(self) -> list[JoinRequest]:
        """The live workers without a rank, in the order in which they are taken: former members by rank, then the others by arrival."""
        waiting = [request for incarnation, request in self._live.items() if incarnation not in self._members]
        return sorted(waiting, key=lambda request: self._former_ranks.get(request.incarnation, len(waiting) + MAX_WORLD_SIZE))

    def has(self, incarnation: str) -> bool:
        """Whether this is a live worker, member or not."""
        return incarnation in self._live

    def goes_on(self, request: JoinRequest) -> bool:
        """Whether a live worker sends this, to replace its membership by a new one."""
        return self._previous(request) is not None

    def is_of(self, request: JoinRequest) -> bool:
        """Whether the live worker of that incarnation sends this, to judge by its certificate and address."""
        live = self._live.get(request.incarnation)
        return live is not None and _is_same(live, request)

    def hangs_on(self, incarnation: str, absent: Container[str]) -> bool:
        """Whether the training goes on, and no worker of the epoch would be there without this member, not even one that waits for the next
        epoch. `absent`: members that are not there."""
        if self._ended or self._former_ranks or incarnation not in self._members:
            return False
        return all(member == incarnation or member in absent for member in self._members)

    def has_place_of(self, incarnation: str, request: JoinRequest) -> bool:
        """Whether the live worker of that incarnation has the place on its machine that another one asks for."""
        live = self._live[incarnation]
        return (live.node, live.worker) == (request.node, request.worker)

    def identity(self, incarnation: str) -> str:
        """The identity that a live worker's certificate has proved."""
        return self._live[incarnation].identity

    def address(self, incarnation: str) -> str:
        """The address where a live worker listens."""
        return self._live[incarnation].address

    def overdue(self, now: float) -> list[str]:
        """Members that must be removed: see [Note: the stuck]."""
        self._watch_the_stuck(now)
        return list(self._members) if self._stuck_since_s is not None and now >= self._stuck_since_s + MISSED_S else []

    def _watch_the_stuck(self, now: float | None = None) -> None:
        """Note since when the others wait for nobody else; if the time is not known, `overdue` notes it, which is then due at once."""
        if not self._waits_for_the_stuck:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now

    def tick(self, now: float) -> list[Notice]:
        """Form the world if enough workers are there and no further ones came for `settle_s`."""
        deadline = self.deadline
        return self._form() if self.state is JobState.FORMING and deadline is not None and now >= deadline else []

    @property
    def deadline(self) -> float | None:
        """The time when `tick` or `overdue` will have something to do, if nothing changes before."""
        if self._waits_for_the_stuck:
            return -math.inf if self._stuck_since_s is None else self._stuck_since_s + MISSED_S
        if self.state is not JobState.FORMING or self._wish is None or len(self._live) < self._wish.min_world_size:
            return None
        if self._first_world_size and not self.ever_ran:
            return None
        return self._last_arrival_s + self._settle_s

    @property
    def _waits_for_the_stuck(self) -> bool:
        return bool(self._members) and self._members.keys() <= self._missed

    def status(self) -> JobStatus:
        wish = self._wish
        return JobStatus(
            job=self.name,
            state=JobState.LOST if self.state is JobState.FINISHED and self._was_lost else self.state,
            epoch=self.epoch,
            joined=len(self._live),
            min_world_size=wish.min_world_size if wish else 0,
            max_world_size=wish.max_world_size if wish else 0,
            members=tuple(sorted(self._members.values(), key=lambda m: m.rank)),
            first_lost=str(min(self._losses.values(), key=lambda loss: loss.follows, default="")),
        )

    def _reform(self) -> list[Notice]:
        """The last member of an epoch has left it."""
        assert self._wish is not None
        self.state = JobState.FORMING
        self._was_lost = True  # unless another epoch begins: joiners that give up are no members, and end no training
        return self._form() if len(self._live) >= self._wish.min_world_size else self._tell_waiting()

    def _form(self) -> list[Notice]:
        assert self._wish is not None
        chosen = self.joiners[: self._wish.max_world_size]
        self.epoch = max(self.epoch, *(request.last_epoch for request in chosen)) + 1
        self.state, self.ever_ran = JobState.RUNNING, True
        self._former_ranks.clear()
        self._gone.clear()
        self._missed.clear()
        members = place(by_wish(chosen))
        self._members = {m.incarnation: m for m in members}
        assigned = [Notice(m.incarnation, Assigned(Topology(self.epoch, m.rank, members))) for m in members]
        return assigned + (self._tell_joiners() if len(self._live) > len(members) else [])

    def _tell_waiting(self, to: Iterable[str] | None = None) -> list[Notice]:
        assert self._wish is not None
        waiting = Waiting(len(self._live), self._wish.min_world_size, self._wish.max_world_size, bool(self._members))
        return [Notice(incarnation, waiting) for incarnation in (self._live if to is None else to)]

    def _tell_lost(self, member: Member, reason: str, *, left: bool) -> list[Notice]:
        return [Notice(other, Lost(self.epoch, member.rank, reason, left)) for other in self._members]

    def _tell_joiners(self) -> list[Notice]:
        if not self._elastic:
            return []
        assert self._wish is not None
        room = max(0, self._wish.max_world_size - len(self._members))
        waiting = len(self._live) - len(self._members)
        joiners = Joiners(min(room, waiting), max(0, waiting - room))
        return [Notice(incarnation, joiners) for incarnation in self._members]

    def _check_duplicate(self, request: JoinRequest, previous: JoinRequest | None, replaces: Collection[str] = ()) -> None:
        """Raise JoinRefused if this worker and a live one, other than `previous` and what it `replaces`, cannot both be there."""
        others = [other for name, other in self._live.items() if other is not previous and name not in replaces]
        same = next((r for r in others if r.identity and r.worker == request.worker), None)
        if same is not None:
            raise JoinRefused(
                f"a live worker of job {self.name!r} at {same.address} already has this certificate and local rank "
                f"{request.local_rank_hint}; give each machine a certificate of its own (shardnet certs issue) and each of its workers "
                "a local rank of its own (`shardnet run` does; otherwise set SHARDNET_LOCAL_RANK); if this worker replaces the live one, "
                "start it again in a few seconds, when the rendezvous has noticed that the old one has ended",
                Refusal.DUPLICATE_WORKER,
            )
        owner = next((r for r in others if r.node == request.node and not may_share_node(r, request)), None)
        if owner is not None:
            raise JoinRefused(
                f"node {request.node!r} belongs to {owner.identity}, but this worker has the certificate of another machine; give "
                "all workers of a machine the same certificate, or, if these are two machines, give each its own name (--node, "
                "SHARDNET_NODE)",
                Refusal.IDENTITY,
            )
        holder = next((r for r in others if r.address == request.address), None)
        if holder is None:
            return
        raise JoinRefused(
            f"{request.address} already belongs to a live worker of job {self.name!r} on node {holder.node}; give this worker another "
            "port; if it replaces the live one, start it again in a few seconds, when the rendezvous has noticed that the old one has "
            "ended",
            Refusal.DUPLICATE_ADDRESS,
        )

    def _check_wish(self, request: JoinRequest) -> None:
        assert self._wish is not None
        if request.wish != self._wish.wish:
            raise JoinRefused(
                f"{request.address} asks for {request.wish} workers, but job {self.name!r} was started with {self._wish.wish} by "
                f"{self._wish.address}; start all workers of a job with the same world size, and all or none of them as elastic "
                "(--min-workers, --restarts)",
                Refusal.WISH,
            )

    def _too_late(self) -> JoinRefused:
        assert self._wish is not None
        most = self._wish.max_world_size
        if len(self._live) == most:
            return JoinRefused(
                f"job {self.name!r} is full: {most} of {most} workers run; use another job id, or start the job with a larger world size",
                Refusal.FULL,
            )
        return JoinRefused(
            f"job {self.name!r} is already running (epoch {self.epoch}, {len(self._live)} of at most {most} workers), and a worker can "
            "join a running job only if both are elastic; start this worker when the job has ended, or use another job id",
            Refusal.RUNNING,
        )


def _is_same(one: JoinRequest, other: JoinRequest) -> bool:
    """Whether two requests come from the same worker, whatever incarnations they name."""
    return (one.identity, one.address) == (other.identity, other.address)
