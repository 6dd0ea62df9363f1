"""What a worker takes from its scheduler: only what no argument or variable of shardnet says, and only if there is a rendezvous."""

import logging

import pytest

from shardnet.errors import UsageError
from shardnet.settings import Settings
from tests.training.scheduled import Environment, allocation, slurm, torchrun

MEETING = {"SHARDNET_RENDEZVOUS": "127.0.0.1:7000"}


def test_the_scheduler_says_who_this_is() -> None:
    found = Settings.from_environment(MEETING | slurm(5, 8, 4))
    assert found == Settings("127.0.0.1:7000", "slurm-4711.0", 8, 8, local_rank=1, wished_rank=5)


def test_an_argument_counts_for_more_than_a_variable_and_that_for_more_than_the_scheduler() -> None:
    environment = MEETING | torchrun(1, 4, 4, "run") | {"SHARDNET_MIN_WORLD_SIZE": "2", "SHARDNET_JOB": "mine"}
    found = Settings.from_environment(environment)
    assert (found.min_world_size, found.max_world_size, found.job, found.wished_rank) == (2, 4, "mine", 1)
    found = Settings.from_environment(environment, min_world_size=3, job="yours", wished_rank=0)
    assert (found.min_world_size, found.max_world_size, found.job, found.wished_rank) == (3, 4, "yours", 0)


def test_a_rendezvous_may_be_given_as_an_argument() -> None:
    assert Settings.from_environment(torchrun(1, 4, 4), rendezvous="127.0.0.1:7000").max_world_size == 4
    assert Settings.from_environment(MEETING | torchrun(1, 4, 4), rendezvous="") == Settings()


def test_who_numbers_workers_does_it_alone() -> None:
    own = {"SHARDNET_WORLD_SIZE": "4", "SHARDNET_LOCAL_RANK": "2"}
    assert Settings.from_environment(MEETING | slurm(1, 4, 4) | own) == Settings(
        *("127.0.0.1:7000", "slurm-4711.0", 4, 4), local_rank=2, wished_rank=-1
    )


def test_a_scheduler_of_other_processes_is_not_asked() -> None:
    """For example workers that are started in two terminals of one Slurm step."""
    own = {"SHARDNET_WORLD_SIZE": "2"}
    assert Settings.from_environment(MEETING | own | slurm(0, 1, 1)) == Settings.from_environment(MEETING | own)


@pytest.mark.parametrize("stray", [{"RANK": "0"}, {"WORLD_SIZE": "8"}, {"PMI_SIZE": "3"}, allocation(4, 2)])
def test_a_stray_variable_changes_nothing_where_the_world_size_is_known(stray: Environment) -> None:
    own = MEETING | {"SHARDNET_WORLD_SIZE": "2", "SHARDNET_LOCAL_RANK": "1"}
    assert Settings.from_environment(own | stray) == Settings.from_environment(own)


def test_half_of_what_there_should_be_is_refused_where_it_is_needed() -> None:
    with pytest.raises(UsageError, match="RANK is set to '1', but WORLD_SIZE is not: torchrun sets both"):
        Settings.from_environment(MEETING | {"RANK": "1"})


def test_the_scheduler_does_not_name_the_job_of_a_certificate() -> None:
    assert Settings.from_environment(MEETING | slurm(0, 2, 2) | {"SHARDNET_CERTS": "node-0"}).job == "default"
    assert Settings.from_environment(MEETING | slurm(0, 2, 2), certs="node-0").job == "default"
    assert Settings.from_environment(MEETING | slurm(0, 2, 2), token="secret").job == "slurm-4711.0"


def test_kubernetes_does_not_say_how_many() -> None:
    with pytest.raises(UsageError, match=r"Kubernetes has started this process as number 1, .*set SHARDNET_WORLD_SIZE to the"):
        Settings.from_environment(MEETING | {"JOB_COMPLETION_INDEX": "1"})
    found = Settings.from_environment(MEETING | {"JOB_COMPLETION_INDEX": "1", "SHARDNET_WORLD_SIZE": "2"})
    assert (found.max_world_size, found.local_rank, found.wished_rank) == (2, 1, 1)


def test_a_world_size_that_makes_no_sense_is_the_schedulers() -> None:
    with pytest.raises(UsageError, match=r"minimum world size is 5 \(SHARDNET_MIN_WORLD_SIZE\) and the maximum 4 \(WORLD_SIZE\)"):
        Settings.from_environment(MEETING | torchrun(0, 4, 4) | {"SHARDNET_MIN_WORLD_SIZE": "5"})


@pytest.mark.parametrize(
    "environment",
    [
        torchrun(0, 4, 4),
        torchrun(1, 4, 4),
        slurm(0, 8, 4),
        allocation(8, 2),
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
    ],
)
def test_without_a_rendezvous_it_is_a_world_of_one(environment: Environment) -> None:
    assert Settings.from_environment(environment) == Settings()


def test_several_without_a_rendezvous_are_told_that_they_are_alone(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        Settings.from_environment(torchrun(rank, 2, 2))
    Settings.from_environment(allocation(2, 1))  # a batch script is one process alone, however many tasks the allocation has
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "torchrun has started 2 of these processes, and each trains alone, because they have no rendezvous"
    )
