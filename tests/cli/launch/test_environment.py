"""What a worker learns from its launcher."""

import os
import platform
import subprocess
import sys

import pytest

from shardnet.cli.launch.environment import available_cores, worker_environment
from shardnet.cli.launch.job import Job
from shardnet.cli.protection import Protection
from shardnet.errors import UsageError


def test_the_least_that_every_worker_gets() -> None:
    environment = worker_environment(
        Job("a.py", nproc=2), 1, "127.0.0.1:7000", {"HOME": "/x", "OMP_NUM_THREADS": "3", "GLIBC_TUNABLES": ""}
    )
    assert environment == {
        "HOME": "/x",
        "OMP_NUM_THREADS": "3",
        "GLIBC_TUNABLES": "",
        "SHARDNET_RENDEZVOUS": "127.0.0.1:7000",
        "SHARDNET_JOB": "default",
        "SHARDNET_WORLD_SIZE": "2",
        "SHARDNET_LOCAL_RANK": "1",
        "SHARDNET_LOCAL_WORLD_SIZE": "2",
        "SHARDNET_INSECURE": "0",
        "SHARDNET_CERTS": "",
        "SHARDNET_TOKEN": "",
        "SHARDNET_TOKEN_FILE": "",
    }


def test_what_only_some_get() -> None:
    job = Job("a.py", nnodes=3, rendezvous="r:1", name="j", node="n", listen="10.0.0.1", protection=Protection(insecure=True), trace="/t")
    environment = worker_environment(job, 0, "r:1", {})
    added = {"SHARDNET_NODE": "n", "SHARDNET_LISTEN": "10.0.0.1", "SHARDNET_INSECURE": "1", "SHARDNET_TRACE": "/t"}
    assert added.items() <= environment.items()
    assert (environment["SHARDNET_JOB"], environment["SHARDNET_WORLD_SIZE"]) == ("j", "3")


@pytest.mark.parametrize(("min_workers", "restarts", "least"), [(2, None, "2"), (None, 3, "4"), (1, 0, "1")])
def test_what_those_of_an_elastic_job_get(min_workers: int | None, restarts: int | None, least: str) -> None:
    job = Job("a.py", nproc=2, nnodes=2, rendezvous="r:1", min_workers=min_workers, restarts=restarts)
    environment = worker_environment(job, 0, "r:1", {})
    added = {"SHARDNET_ELASTIC": "1", "SHARDNET_MIN_WORLD_SIZE": least, "SHARDNET_WORLD_SIZE": "4"}
    assert added.items() <= environment.items()


def test_ranks_follow_from_which_machine_it_is() -> None:
    job = Job("a.py", nproc=2, nnodes=3, node_rank=1, rendezvous="r:1")
    assert [worker_environment(job, local_rank, "r:1", {})["SHARDNET_WISHED_RANK"] for local_rank in range(2)] == ["2", "3"]


def test_a_machine_is_one_of_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="--node-rank must be from 0 to 2 with 3 nodes, got 3"):
        Job("a.py", nnodes=3, node_rank=3, rendezvous="r:1")


@pytest.mark.parametrize(("nnodes", "min_workers", "here"), [(1, 2, 2), (1, None, 4), (2, None, 4), (2, 5, 1), (2, 4, 0), (3, 1, 0)])
def test_what_a_machine_has_to_give_if_the_others_lose_nobody(nnodes: int, min_workers: int | None, here: int) -> None:
    assert Job("a.py", nproc=4, nnodes=nnodes, rendezvous="r:1", min_workers=min_workers).least_workers_here == here


@pytest.mark.parametrize(("nproc", "threads"), [(1, available_cores()), (available_cores(), 1), (10 * available_cores(), 1)])
def test_the_cores_are_shared_out(nproc: int, threads: int) -> None:
    assert worker_environment(Job("a.py", nproc=nproc), 0, "r:1", {})["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have another malloc")
@pytest.mark.parametrize(("size", "users"), [(600, False), (40, False), (600, True)])
def test_malloc_joins_what_is_freed_at_once(size: int, users: bool) -> None:
    """Two adjacent freed small blocks make room for one that is twice as large, unless the user wants them set aside."""
    program = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc({size}) for _ in range(5000)]
first = max(here for here, there in zip(blocks, blocks[1:-1]) if there - here == {size} + 8)
second = blocks[blocks.index(first) + 1]
libc.free(first)
libc.free(second)
print(libc.malloc({2 * size}) == first)
"""
    environment = worker_environment(Job("a.py"), 0, "r:1", {"GLIBC_TUNABLES": "glibc.malloc.check=0"} if users else {})
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=30.0)
    assert told.stdout == f"{not users}\n"


def test_the_launchers_own_environment_is_inherited_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/the/user")
    monkeypatch.setenv("SHARDNET_REPLACEMENT", "1")  # the manifests of docker/kubernetes say so to launchers
    environment = worker_environment(Job("a.py"), 0, "r:1")
    assert (environment["HOME"], environment["SHARDNET_REPLACEMENT"]) == ("/of/the/user", "1")
    assert "SHARDNET_LOCAL_RANK" not in os.environ


@pytest.mark.parametrize(
    "wrong",
    [{"nproc": 0}, {"nnodes": 0}, {"nnodes": 2}, {"grace_s": -1.0}, {"min_workers": 0}, {"min_workers": 2}, {"restarts": -1}],
)
def test_jobs_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Job("a.py", **wrong)  # type: ignore[arg-type]
