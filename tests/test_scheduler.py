"""What each scheduler tells a process, which one counts if there are several, and the error for incomplete variables."""

import pytest

from shardnet.errors import UsageError
from shardnet.scheduler import Task
from tests.training.scheduled import allocation, mpiexec, open_mpi, slurm, torchrun


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        (torchrun(5, 8, 4, "lm-7"), Task("torchrun", 5, 8, "WORLD_SIZE", 1, "torchrun-lm-7")),
        (torchrun(5, 8, 4), Task("torchrun", 5, 8, "WORLD_SIZE", 1)),  # --rdzv-id was not given: "none"
        ({"RANK": "5", "WORLD_SIZE": "8"}, Task("torchrun", 5, 8, "WORLD_SIZE", 5)),
        (open_mpi(5, 8, 4), Task("Open MPI", 5, 8, "OMPI_COMM_WORLD_SIZE", 1)),
        (mpiexec(5, 8, 4), Task("mpiexec", 5, 8, "PMI_SIZE", 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, Task("mpiexec", 5, 8, "PMI_SIZE", 5)),
        (slurm(5, 8, 4, step=2), Task("Slurm", 5, 8, "SLURM_STEP_NUM_TASKS", 1, "slurm-4711.2")),
        ({"JOB_COMPLETION_INDEX": "5"}, Task("Kubernetes", 5, None, "", 5)),
    ],
)
def test_what_each_says(environment: dict[str, str], task: Task) -> None:
    assert Task.find(environment) == task


@pytest.mark.parametrize(
    "environment",
    [
        {},
        dict.fromkeys(torchrun(0, 1, 1) | slurm(0, 1, 1), ""),
        allocation(tasks=4, nodes=2),  # a batch script, or a shell of salloc
        slurm(0, 4, 2) | {"SLURM_STEP_ID": str(0xFFFF_FFFA)},  # the same where salloc opens its shell on a node
        slurm(1, 4, 2) | {"SHARDNET_LOCAL_WORLD_SIZE": "2"},  # a worker of `shardnet run`
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
    ],
)
def test_nobody_has_started_several(environment: dict[str, str]) -> None:
    assert Task.find(environment) is None


@pytest.mark.parametrize(
    ("environments", "scheduler"),
    [
        ([{"JOB_COMPLETION_INDEX": "1"}, torchrun(3, 4, 2)], "torchrun"),
        ([slurm(1, 2, 1), torchrun(3, 4, 2)], "torchrun"),
        ([slurm(1, 2, 1), open_mpi(3, 4, 2)], "Open MPI"),
        ([slurm(1, 2, 1), mpiexec(3, 4, 2)], "mpiexec"),
        ([allocation(4, 2), torchrun(3, 4, 4)], "torchrun"),
        ([slurm(3, 4, 2), {"WORLD_SIZE": "8"}], "Slurm"),  # a complete set of variables counts before an incomplete one
    ],
)
def test_the_innermost_that_has_said_all_is_believed(environments: list[dict[str, str]], scheduler: str) -> None:
    found = Task.find({name: value for each in environments for name, value in each.items()})
    assert found is not None
    assert (found.scheduler, found.rank) == (scheduler, 3)


def test_who_counts_other_processes_has_started_something_else() -> None:
    assert Task.find(slurm(1, 2, 1), 4) is None
    assert Task.find(slurm(1, 2, 1), 2) is not None
    assert Task.find({"JOB_COMPLETION_INDEX": "1"}, 4) is not None


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (
            {"RANK": "1"},
            "RANK is set to '1', but WORLD_SIZE is not: torchrun sets both; set WORLD_SIZE, too, or unset RANK, or give the number",
        ),
        ({"WORLD_SIZE": "2", "SLURM_PROCID": "0"}, "WORLD_SIZE is set to '2', but RANK is not: torchrun sets both"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set to '2', but OMPI_COMM_WORLD_RANK is not: Open MPI sets both"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set to '0', but PMI_SIZE is not"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is set to '2', but SLURM_PROCID is not"),
    ],
)
def test_half_of_what_there_should_be_is_named_where_it_is_needed(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        Task.find(environment)
    assert str(refused.value).startswith(complaint)
    assert Task.find(environment, 2) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"RANK": "first"}, "RANK must be a whole number from 0 on, got 'first'; unset it if no scheduler has set it"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number from 0 on, got '-1'"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK must be a whole number from 0 on, got '1.0'"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4: the rank must be less; set both as torchrun does, or neither"),
    ],
)
def test_numbers_that_make_no_sense_are_named(changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        Task.find(torchrun(1, 4, 2) | changes)
    assert str(refused.value).startswith(complaint)
