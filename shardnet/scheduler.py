"""`Task`: a process as the scheduler counts it that has started it.

[Note: schedulers] Each of them tells the processes that it starts who they are, in variables of its own:

| | rank | world size | local rank | job |
|---|---|---|---|---|
| torchrun | RANK | WORLD_SIZE | LOCAL_RANK | TORCHELASTIC_RUN_ID |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK | |
| mpiexec of MPICH and Intel | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID | |
| Slurm's srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID | SLURM_JOB_ID, SLURM_STEP_ID |
| Kubernetes, an Indexed Job | JOB_COMPLETION_INDEX | | | |

(docs.pytorch.org/docs/stable/elastic/run.html, docs.open-mpi.org on environment variables, srun(1), kubernetes.io on Indexed Jobs.) They
stand in the order in which they are found one inside the other: torchrun is started by srun, and not the other way. The innermost one
that has said all counts, for it has started this very process. `shardnet run` is further inside than any: whom it has started listens to
nobody else.

Slurm says SLURM_NTASKS and SLURM_PROCID=0 in batch scripts, too, and in the shell of an allocation, where nothing has been started
side by side: so what counts is the number of tasks of a step, which srun sets. Where salloc opens its shell as a step (use_interactive_step
in slurm.conf) that step has a number beyond all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shardnet.errors import UsageError

LAUNCHED = "SHARDNET_LOCAL_WORLD_SIZE"  # `shardnet run` sets it for its workers
_SPECIAL_STEPS = 0xFFFF_FFF0  # Slurm's batch, interactive and other steps have numbers from here on (slurm.h)


@dataclass(frozen=True, slots=True)
class _Scheduler:
    """The names of its variables; empty: it has none for that."""

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

    scheduler        what it is called
    rank             0-based number among all of them
    world_size       how many they are; None if it does not say
    world_size_from  the variable that says so, for messages
    local_rank       0-based number among those of this machine; the rank, which serves as well to tell them apart, if it does not say
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
        """What the innermost scheduler says of this process; None if none does, or if it counts other processes than the `world_size`
        that are wanted: it has started something else then. An empty variable is one that is not set.

        Raises UsageError for numbers that make no sense and, unless the world size is known, for half of what there should be.
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
                f"{scheduler.rank} is {rank}, but {scheduler.world_size} is {world_size}: ranks are less than that; set both as "
                f"{scheduler.name} does, or neither"
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
        f"{present}, or say how many workers there are by SHARDNET_WORLD_SIZE"
    )


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name} must be a whole number from 0 on, got {text!r}; unset it if no scheduler has set it")
    return int(text)


def _job(scheduler: _Scheduler, environment: Mapping[str, str]) -> str:
    """Such as slurm-1234.0: the step is part of it, since an allocation may train twice, even at once."""
    parts = [environment.get(name, "") for name in scheduler.job]
    if not parts or not all(parts) or parts == ["none"]:  # torchrun's run id unless it is given one
        return ""
    return f"{scheduler.name.lower()}-{'.'.join(parts)}"
