"""`Registry`: all jobs of one rendezvous, as a pure state machine. No I/O, no clock: time comes in as an argument.

[Note: who may come back] A connection that breaks says little: the worker may have died, but it may also be the rendezvous that was frozen,
cut off or started again, while the job trains on. As long as another member is connected it does not matter: the others are told, and find
out. But when none is left, workers that are new would begin the job a second time, beside the first one. So then the last member counts as
absent: it is still a member, and new workers wait. If one of the members comes back within the time that it has, it finds its job.
"""

from dataclasses import dataclass, replace

from shardnet.errors import JoinRefused, UsageError
from shardnet.rendezvous.events import Ended, JobState, JobStatus, Notice
from shardnet.rendezvous.job import Job
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.store import NoStore, Store

LEFT = "it left"
VANISHED = "its connection to the rendezvous broke"
ABSENT = "it has not come back to the rendezvous"
MISSED = "the others go on without it"


@dataclass(frozen=True, slots=True)
class RendezvousLimits:
    """What bounds the memory of a rendezvous.

    max_jobs     forming, running and finished ones; the oldest finished one makes room for a new one
    max_members  live workers over all jobs

    Raises UsageError for values that make no sense.
    """

    max_jobs: int = 256
    max_members: int = 4096

    def __post_init__(self) -> None:
        if self.max_jobs < 1 or self.max_members < 1:
            raise UsageError(f"RendezvousLimits must be at least 1, got {self}")


class Registry:
    """The jobs by id and the members by incarnation; lives as long as the rendezvous.

    Every change returns the notices to deliver, in order. Time is in seconds of any clock that never goes back.
    """

    def __init__(
        self,
        *,
        settle_s: float = 2.0,
        limits: RendezvousLimits | None = None,
        store: Store | None = None,
        first_world_size: int = 0,
    ) -> None:
        """`settle_s`: how long a job that has its minimum of workers waits for one more. `first_world_size`: see `Job`."""
        self._settle_s = settle_s
        self._first_world_size = first_world_size
        self._limits = limits or RendezvousLimits()
        self._jobs: dict[str, Job] = {}  # the oldest first
        self._job_of: dict[str, Job] = {}  # of every live member
        self._forgotten_epoch = 0  # the highest epoch of all dropped jobs: epochs grow even for a job id that returns
        self._store = store or NoStore()
        self._absent: dict[str, float] = {}  # members without a connection, and until when they may come back

    def join(self, request: JoinRequest, now: float) -> list[Notice]:
        """Take a worker into its job. Raises JoinRefused, saying what is wrong and what to do, and changes nothing then."""
        if again := self._assign_again(request):
            return again
        self._check_new(request)
        replaced = self._replaced_by(request)
        job = self._jobs.get(request.job)
        if job is None:
            self._make_room()
            job = Job(request.job, self._forgotten_epoch, self._settle_s, self._first_world_size)
        try:
            notices = job.join(request, now, replaced)
        except JoinRefused as refusal:
            raise self._for_now(job, refusal) from None
        self._jobs[request.job] = self._job_of[request.incarnation] = job
        if self._job_of.get(request.previous) is job and not job.has(request.previous):
            del self._job_of[request.previous]  # the new membership has replaced the previous one
            self._absent.pop(request.previous, None)
        for incarnation in replaced:  # after the new one, which belongs to the epoch that may begin by this
            notices += self.vanish(incarnation)
        self._save(job)
        return notices

    def _assign_again(self, request: JoinRequest) -> list[Notice]:
        """Tell a worker its place that was given one and lost its connection before it heard of that. Empty for any other worker."""
        job = self._job_of.get(request.incarnation)
        if job is None or request.incarnation not in self._absent or not job.is_of(request):
            return []
        if notices := job.assigned(request.incarnation):
            del self._absent[request.incarnation]
        return notices

    def restore(self, until: float) -> None:
        """Go on with the jobs in the store. Members count as live until the time `until`, and then vanish unless they have resumed."""
        for saved in self._store.load():
            self._jobs[saved.name] = job = Job.restored(saved, self._settle_s)
            for _, request in saved.members:
                self._job_of[request.incarnation] = job
                self._absent[request.incarnation] = until

    def resume(self, request: JoinRequest) -> list[Notice]:
        """A member is back after its connection broke or the rendezvous was restarted. Raises JoinRefused if it is no longer a member,
        or has joined again meanwhile."""
        job = self._job_of.get(request.incarnation)
        if job is not None and not (job.name == request.job and job.is_of(request)):
            job = None  # everybody can know an incarnation: it makes nobody that member
        if job is not None and self._absent.pop(request.incarnation, None) is None:
            raise JoinRefused(f"incarnation {request.incarnation!r} has an open connection already", Refusal.DUPLICATE_INCARNATION)
        if job is None:
            job = self._jobs.get(request.job)
            if job is None or not job.readmit(request):
                raise JoinRefused(
                    f"job {request.job!r} has no member {request.incarnation!r} at {request.address}: the job went on without this worker, "
                    "or this rendezvous was restarted without its saved state (shardnet rendezvous --state)",
                    Refusal.UNKNOWN,
                )
            self._job_of[request.incarnation] = job
            self._save(job)
        return job.greet(request.incarnation)

    def is_member(self, incarnation: str) -> bool:
        return incarnation in self._job_of

    def job_of(self, incarnation: str) -> str | None:
        """The job of a live member; None if there is no such member."""
        job = self._job_of.get(incarnation)
        return None if job is None else job.name

    def address(self, job: str, incarnation: str) -> str | None:
        """The address where a live member of that job listens; None if there is no such member."""
        home = self._job_of.get(incarnation)
        return home.address(incarnation) if home is not None and home.name == job else None

    def identity(self, incarnation: str) -> str | None:
        """The identity that a member's certificate has proved; None if there is no such member."""
        job = self._job_of.get(incarnation)
        return None if job is None else job.identity(incarnation)

    @property
    def is_done(self) -> bool:
        """Whether the training of some job has ended with goodbyes, and no job has a worker left."""
        return not self._job_of and any(job.is_done for job in self._jobs.values())

    def leave(self, job: str, incarnation: str) -> list[Notice]:
        """A member says goodbye. Nothing happens if it is not a member: leaving twice is the same as leaving once."""
        home = self._job_of.get(incarnation)
        return self._remove(incarnation, LEFT, left=True) if home is not None and home.name == job else []

    def fail(self, job: str, incarnation: str, why: str, *, follows: bool = False) -> list[Notice]:
        """A member ends without a goodbye, and says why, and whether that follows from the end of another member. Nothing happens if it is
        not a member."""
        home = self._job_of.get(incarnation)
        return self._remove(incarnation, why, left=False, follows=follows) if home is not None and home.name == job else []

    def disconnect(self, incarnation: str, until: float) -> list[Notice]:
        """A member's connection broke: it has vanished, or may come back until then. See [Note: who may come back]. Nothing happens if it
        left before."""
        job = self._job_of.get(incarnation)
        if job is None or not job.hangs_on(incarnation, self._absent):
            return self.vanish(incarnation)
        self._absent[incarnation] = until
        return []

    def vanish(self, incarnation: str) -> list[Notice]:
        """A member is gone, without a goodbye. Nothing happens if it left before."""
        return self._remove(incarnation, VANISHED, left=False) if incarnation in self._job_of else []

    def tick(self, now: float) -> list[Notice]:
        """Form the worlds whose time has come, and remove members that have not come back, or that hold up all others."""
        notices = [notice for incarnation, why in self.late(now).items() for notice in self._remove(incarnation, why, left=False)]
        for job in self._jobs.values():
            if formed := job.tick(now):
                self._save(job)
                notices += formed
        return notices

    def late(self, now: float) -> dict[str, str]:
        """The members that `tick` would remove, and why."""
        absent = {incarnation: ABSENT for incarnation, until in self._absent.items() if until <= now}
        return absent | {incarnation: MISSED for job in self._jobs.values() for incarnation in job.overdue(now)}

    def deadline(self) -> float | None:
        """The time when `tick` must be called next, if nothing changes before."""
        deadlines = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        return min([*deadlines, *self._absent.values()], default=None)

    def status(self, job: str = "") -> tuple[JobStatus, ...]:
        """One job (or none, if it is unknown), or all of them, the oldest first."""
        return tuple(replace(j.status(), absent=self._absent_from(j)) for name, j in self._jobs.items() if job in ("", name))

    def _for_now(self, job: Job, refusal: JoinRefused) -> JoinRefused:
        """The same refusal, or another one if the job may have a place as soon as absent members are given up."""
        absent = self._absent_from(job)
        if not absent or refusal.reason not in (Refusal.FULL, Refusal.RUNNING, Refusal.DUPLICATE_WORKER, Refusal.DUPLICATE_ADDRESS):
            return refusal
        return JoinRefused(
            f"job {job.name!r} may still be running: {absent} of its workers have no connection to the rendezvous now; they are given up "
            "within seconds, so try again then",
            Refusal.ABSENT,
        )

    def _replaced_by(self, request: JoinRequest) -> list[str]:
        """The absent members in whose place a worker was started: whoever did so has seen their end. Only its first request says that."""
        if not request.replacement or request.last_epoch:
            return []
        here = [incarnation for incarnation in self._absent if self._job_of[incarnation].name == request.job]
        return [incarnation for incarnation in here if self._job_of[incarnation].has_place_of(incarnation, request)]

    def _absent_from(self, job: Job) -> int:
        return sum(self._job_of[incarnation] is job for incarnation in self._absent)

    def _remove(self, incarnation: str, reason: str, *, left: bool, follows: bool = False) -> list[Notice]:
        job = self._job_of.pop(incarnation)
        self._absent.pop(incarnation, None)
        notices = job.remove(incarnation, reason, left=left, follows=follows)
        for notice in notices:
            if isinstance(notice.event, Ended):
                del self._job_of[notice.to]
        self._save(job)
        if job.state is JobState.FINISHED and not job.ever_ran:
            del self._jobs[job.name]  # no epoch number is used up: there is nothing to remember
        return notices

    def _save(self, job: Job) -> None:
        if (saved := job.saved) is not None:
            self._store.save(saved)

    def _check_new(self, request: JoinRequest) -> None:
        if request.incarnation in self._job_of:
            raise JoinRefused(
                f"incarnation {request.incarnation!r} is a member of job {self._job_of[request.incarnation].name!r} already; "
                "every start of a worker must make a new one",
                Refusal.DUPLICATE_INCARNATION,
            )
        most = self._limits.max_members
        if request.max_world_size > most:
            raise JoinRefused(
                f"job {request.job!r} asks for {request.wish} workers, but this rendezvous takes at most {most}; ask for fewer",
                Refusal.FULL,
            )
        job = self._jobs.get(request.job)
        goes_on = job is not None and job.goes_on(request)
        if len(self._job_of) - goes_on >= most:
            raise JoinRefused(
                f"this rendezvous already has {most} workers, which is its maximum; use another one, or wait until a job has ended",
                Refusal.FULL,
            )

    def _make_room(self) -> None:
        if len(self._jobs) < self._limits.max_jobs:
            return
        finished = next((job for job in self._jobs.values() if job.state is JobState.FINISHED), None)
        if finished is None:
            raise JoinRefused(
                f"this rendezvous already has {self._limits.max_jobs} unfinished jobs, which is its maximum; use another one, "
                "or wait until a job has ended",
                Refusal.FULL,
            )
        del self._jobs[finished.name]
        self._store.drop(finished.name)
        self._forgotten_epoch = max(self._forgotten_epoch, finished.epoch)
