"""`Task`: a process, as numbered by the scheduler that has started it.

[Note: schedulers] Each scheduler tells the processes that it starts their rank and more, in environment variables of its own:

| | rank | world size | local rank | job |
|---|---|---|---|---|
| torchrun | RANK | WORLD_SIZE | LOCAL_RANK | TORCHELASTIC_RUN_ID |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK | |
| mpiexec of MPICH and Intel | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID | |
| Slurm's srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID | SLURM_JOB_ID, SLURM_STEP_ID |
| Kubernetes, an Indexed Job | JOB_COMPLETION_INDEX | | | |

(docs.pytorch.org/docs/stable/elastic/run.html, docs.open-mpi.org on environment variables, srun(1), kubernetes.io on Indexed Jobs.) The
table lists the innermost scheduler first: srun starts torchrun, and not the other way round. The innermost one whose variables are
complete counts, because it has started this very process. `shardnet run` is further inside than any of them: its workers listen to no
other.

Slurm also sets SLURM_NTASKS and SLURM_PROCID=0 in batch scripts and in the shell of an allocation, where no tasks have been started side by
side. So the number of tasks of a step counts, which srun sets. If salloc opens its shell as a step (use_interactive_step in slurm.conf),
that step has a number above those of all normal steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shardnet.errors import UsageError

LAUNCHED = "SHARDNET_LOCAL_WORLD_SIZE"  # `shardnet run` sets it for its workers
_SPECIAL_STEPS = 0xFFFF_FFF0  # Slurm's batch, interactive and other steps have numbers from here on (slurm.h)


@dataclass(frozen=True, slots=True)
class _Scheduler:
    """A scheduler with the names of its variables; empty: it has no such variable."""

    name: str
    rank: str
    world_size: str = ""
    local_rank: str = ""
    job: tuple[str, ...] = ()


TORCHRUN = _Scheduler("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("TORCHELASTIC_RUN_ID",))
OPEN_MPI = _Scheduler("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
PMI = _Scheduler("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
SLURM = _Scheduler("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_ID"))
INDEXED_JOB = _Scheduler("Kubernetes", "JOB_COMPLETION_INDEX")
_INNERMOST_FIRST = (TORCHRUN, OPEN_MPI, PMI, SLURM, INDEXED_JOB)


@dataclass(frozen=True, slots=True)
class Task:
    """One of the processes that a scheduler has started together.

    scheduler        its name
    rank             0-based number among all of these processes
    world_size       how many there are; None if the scheduler does not say
    world_size_from  the variable that says so, for messages
    local_rank       0-based number among those on this machine; if the scheduler does not say, the rank, which also tells them apart
    job              a name that no other start has, for the job at a rendezvous; empty if there is none
    """

    scheduler: str
    rank: int
    world_size: int | None = None
    world_size_from: str = ""
    local_rank: int = 0
    job: str = ""

    @classmethod
    def find(cls, environment: Mapping[str, str], world_size: int | None = None) -> Self | None:
        """What the innermost scheduler says about this process. None if none says anything, or if its world size is not the `world_size`
        that is wanted: then it has started something else. An empty variable counts as not set.

        Raises UsageError for numbers that make no sense and, unless the world size is given, for incomplete variables.
        """
        if environment.get(LAUNCHED):
            return None
        speaking = [scheduler for scheduler in _INNERMOST_FIRST if _speaks(scheduler, environment)]
        whole = next((scheduler for scheduler in speaking if not _missing(scheduler, environment)), None)
        if whole is not None:
            task = cls._read(whole, environment)
            return task if world_size is None or task.world_size in (None, world_size) else None
        if speaking and world_size is None:
            raise _half(speaking[0], environment)
        return None

    @classmethod
    def _read(cls, scheduler: _Scheduler, environment: Mapping[str, str]) -> Self:
        rank = _number(scheduler.rank, environment)
        world_size = _number(scheduler.world_size, environment) if scheduler.world_size else None
        if world_size is not None and rank >= world_size:
            raise UsageError(
                f"{scheduler.rank} is {rank}, but {scheduler.world_size} is {world_size}: the rank must be less; set both "
                f"as {scheduler.name} does, or neither"
            )
        local_rank = _number(scheduler.local_rank, environment) if environment.get(scheduler.local_rank) else rank
        return cls(scheduler.name, rank, world_size, scheduler.world_size, local_rank, _job(scheduler, environment))


def _speaks(scheduler: _Scheduler, environment: Mapping[str, str]) -> bool:
    if scheduler is SLURM:  # a rank alone is a batch script's; see [Note: schedulers]
        step = environment.get("SLURM_STEP_ID", "")
        special = step.isdecimal() and int(step) >= _SPECIAL_STEPS
        return bool(environment.get(scheduler.world_size)) and not special
    return any(environment.get(name) for name in (scheduler.rank, scheduler.world_size) if name)


def _missing(scheduler: _Scheduler, environment: Mapping[str, str]) -> list[str]:
    return [name for name in (scheduler.rank, scheduler.world_size) if name and not environment.get(name)]


def _half(scheduler: _Scheduler, environment: Mapping[str, str]) -> UsageError:
    (missing,) = _missing(scheduler, environment)
    present = scheduler.rank if missing == scheduler.world_size else scheduler.world_size
    return UsageError(
        f"{present} is set to {environment[present]!r}, but {missing} is not: {scheduler.name} sets both; set {missing}, too, or unset "
        f"{present}, or give the number of workers in SHARDNET_WORLD_SIZE"
    )


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name} must be a whole number from 0 on, got {text!r}; unset it if no scheduler has set it")
    return int(text)


def _job(scheduler: _Scheduler, environment: Mapping[str, str]) -> str:
    """The job's name, such as slurm-1234.0: the step is part of it, since an allocation may train twice, even at the same time."""
    parts = [environment.get(name, "") for name in scheduler.job]
    if not parts or not all(parts) or parts == ["none"]:  # "none" is torchrun's run id if the user gives it none
        return ""
    return f"{scheduler.name.lower()}-{'.'.join(parts)}"
