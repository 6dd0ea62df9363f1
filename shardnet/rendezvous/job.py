"""`Job`: the membership of one job, as a pure state machine. No I/O, no clock: time comes in as an argument."""

from shardnet.errors import JoinRefused
from shardnet.rendezvous.events import Assigned, JobState, JobStatus, Lost, Notice, Waiting
from shardnet.rendezvous.placement import place
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest, may_share_node
from shardnet.topology import Member, Topology


class Job:
    """Who is in one job; lives through all of the job's epochs. `JobState` says what may follow what.

    Every method returns the notices to deliver, in order.
    """

    def __init__(self, name: str, epoch: int, settle_s: float) -> None:
        """`epoch` is the last one that is used up; `settle_s` is how long at least `min_world_size` workers wait for more."""
        self.name = name
        self.epoch = epoch
        self.state = JobState.FINISHED
        self.ever_ran = False
        self._settle_s = settle_s
        self._live: dict[str, JoinRequest] = {}  # by incarnation, in order of arrival
        self._members: dict[str, Member] = {}  # the same ones with their ranks; empty unless RUNNING
        self._wish: JoinRequest | None = None  # of the one who started the forming: its sizes hold for all
        self._last_arrival_s = 0.0

    def join(self, request: JoinRequest, now: float) -> list[Notice]:
        """Take a worker in, or raise JoinRefused and change nothing."""
        self._check_duplicate(request)
        if self.state is JobState.RUNNING:
            raise self._too_late()
        if not self._live:
            self.state, self._wish = JobState.FORMING, request
        self._check_wish(request)
        self._live[request.incarnation] = request
        self._last_arrival_s = now
        return self._form() if len(self._live) == request.max_world_size else self._tell_waiting()

    def remove(self, incarnation: str, reason: str, *, left: bool) -> list[Notice]:
        """A member left or vanished: its place is free while FORMING, and the others are told."""
        del self._live[incarnation]
        member = self._members.pop(incarnation, None)
        if not self._live:
            self.state = JobState.FINISHED
            return []
        if member is None:
            return self._tell_waiting()
        return [Notice(other, Lost(self.epoch, member.rank, reason, left)) for other in self._live]

    def identity(self, incarnation: str) -> str:
        """What a live member's certificate has proved."""
        return self._live[incarnation].identity

    def tick(self, now: float) -> list[Notice]:
        """Form the world if enough workers are there and no more came for `settle_s`."""
        deadline = self.deadline
        return self._form() if deadline is not None and now >= deadline else []

    @property
    def deadline(self) -> float | None:
        """When `tick` would do something, if nothing changes before."""
        if self.state is not JobState.FORMING or self._wish is None or len(self._live) < self._wish.min_world_size:
            return None
        return self._last_arrival_s + self._settle_s

    def status(self) -> JobStatus:
        wish = self._wish
        return JobStatus(
            job=self.name,
            state=self.state,
            epoch=self.epoch,
            joined=len(self._live),
            min_world_size=wish.min_world_size if wish else 0,
            max_world_size=wish.max_world_size if wish else 0,
            members=tuple(sorted(self._members.values(), key=lambda m: m.rank)),
        )

    def _form(self) -> list[Notice]:
        self.epoch += 1
        self.state, self.ever_ran = JobState.RUNNING, True
        members = place(list(self._live.values()))
        self._members = {m.incarnation: m for m in members}
        return [Notice(m.incarnation, Assigned(Topology(self.epoch, m.rank, members))) for m in members]

    def _tell_waiting(self) -> list[Notice]:
        assert self._wish is not None
        waiting = Waiting(len(self._live), self._wish.min_world_size, self._wish.max_world_size)
        return [Notice(incarnation, waiting) for incarnation in self._live]

    def _check_duplicate(self, request: JoinRequest) -> None:
        same = next((r for r in self._live.values() if r.identity and r.worker == request.worker), None)
        if same is not None:
            raise JoinRefused(
                f"local rank {request.local_rank_hint} of the machine with this certificate is a live worker of job {self.name!r} at "
                f"{same.address}; give each machine a certificate of its own (shardnet certs issue) and each of its workers a local rank "
                "(`shardnet run` does; else SHARDNET_LOCAL_RANK), or, if it is that one's restart, start it again when the rendezvous has "
                "noticed the old one's end (seconds)",
                Refusal.DUPLICATE_WORKER,
            )
        owner = next((r for r in self._live.values() if r.node == request.node and not may_share_node(r, request)), None)
        if owner is not None:
            raise JoinRefused(
                f"node {request.node!r} is that of {owner.identity}, and this worker has the certificate of another machine; "
                "a machine has one certificate, or, if these are two, each needs a name of its own (--node, SHARDNET_NODE)",
                Refusal.IDENTITY,
            )
        holder = next((r for r in self._live.values() if r.address == request.address), None)
        if holder is None:
            return
        raise JoinRefused(
            f"{request.address} belongs to a live worker of job {self.name!r} on node {holder.node}, which keeps it; give this worker "
            "another port, or, if it is that one's restart, start it again when the rendezvous has noticed the old one's end (seconds)",
            Refusal.DUPLICATE_ADDRESS,
        )

    def _check_wish(self, request: JoinRequest) -> None:
        assert self._wish is not None
        if request.wish != self._wish.wish:
            raise JoinRefused(
                f"{request.address} asks for {request.wish} workers, but job {self.name!r} was started with {self._wish.wish} by "
                f"{self._wish.address}; start all workers of a job with the same world size",
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
            f"job {self.name!r} runs already (epoch {self.epoch}, {len(self._live)} of at most {most} workers) and this version takes "
            "nobody into a running job; start this worker when the job has ended, or use another job id",
            Refusal.RUNNING,
        )
