"""Worlds of workers started by a scheduler."""

import json
from pathlib import Path

from tests.training.scheduled import Environment, open_mpi, slurm
from tests.training.workers import Nursery


def world(nursery: Nursery, folder: Path, environments: list[Environment]) -> list[list[int]]:
    """A process in each of these environments: [rank, world size, node, local rank] of each."""
    answers = [folder / str(number) for number in range(len(environments))]
    with (folder / "output").open("w+") as output, Path("/dev/null").open() as nothing:
        descriptors = (nothing.fileno(), output.fileno(), output.fileno())
        arguments = [(json.dumps(each), str(answer)) for each, answer in zip(environments, answers, strict=True)]
        pids = [nursery.fork("tests.training.scheduled:join", *each, descriptors=descriptors) for each in arguments]
        ends = [nursery.wait_or_kill(pid, 30.0) for pid in pids]
        output.seek(0)
        assert set(ends) == {0}, output.read()
    return [json.loads(answer.read_text()) for answer in answers]


def on_nodes(meeting: str, environments: list[Environment], nodes: str) -> list[Environment]:
    return [each | {"SHARDNET_RENDEZVOUS": meeting, "SHARDNET_NODE": node} for each, node in zip(environments, nodes, strict=True)]


def test_tasks_of_a_slurm_step(nursery: Nursery, meeting: str, tmp_path: Path) -> None:
    tasks = on_nodes(meeting, [slurm(rank, 4, 2) for rank in (3, 0, 2, 1)], "baba")
    assert world(nursery, tmp_path, tasks) == [[3, 4, 1, 1], [0, 4, 0, 0], [2, 4, 1, 0], [1, 4, 0, 1]]


def test_processes_of_mpirun(nursery: Nursery, meeting: str, tmp_path: Path) -> None:
    assert world(nursery, tmp_path, on_nodes(meeting, [open_mpi(rank, 2, 2) for rank in (1, 0)], "aa")) == [[1, 2, 0, 1], [0, 2, 0, 0]]


def test_pods_of_an_indexed_job(nursery: Nursery, meeting: str, tmp_path: Path) -> None:
    pods = [{"JOB_COMPLETION_INDEX": str(index), "SHARDNET_WORLD_SIZE": "2"} for index in (1, 0)]
    assert world(nursery, tmp_path, on_nodes(meeting, pods, "ba")) == [[1, 2, 1, 0], [0, 2, 0, 0]]


def test_who_gets_another_rank_is_told(nursery: Nursery, meeting: str, tmp_path: Path) -> None:
    """The scheduler deals out ranks over the nodes in turn, but shardnet keeps nodes together."""
    assert world(nursery, tmp_path, on_nodes(meeting, [open_mpi(rank, 3, 2) for rank in range(3)], "aba")) == [
        [0, 3, 0, 0],
        [2, 3, 1, 0],
        [1, 3, 0, 1],
    ]
    said = (tmp_path / "output").read_text()
    assert said.count("this worker asked for rank") == 1  # one worker of each node where it happens
    assert "[rank 2/3 epoch 1] this worker asked for rank 1, but got another one" in said
