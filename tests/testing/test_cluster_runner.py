"""The fixture `cluster`, as users have it: ranks as threads and as processes, and what a test is told of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardnet import Cluster
from shardnet.errors import PeerLost, UsageError
from shardnet.testing import ClusterRunner, Faults, RanksFailed, same_bits
from shardnet.testing.rank_failure import RankFailure
from tests.testing import training

both = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@both
def test_all_ranks_learn_the_same_as_one_does(cluster: ClusterRunner, processes: bool) -> None:
    (alone,) = cluster.run(training.train, 1, processes=processes)
    ranks = cluster.run(training.train, 3, processes=processes)
    for name, value in alone.items():
        assert all(same_bits(rank[name], ranks[0][name]) for rank in ranks)
        torch.testing.assert_close(ranks[0][name], value)


@both
def test_results_are_by_rank_and_arguments_arrive(cluster: ClusterRunner, processes: bool) -> None:
    given = (7, {"a": torch.arange(3)}, [None, "text"])
    found = cluster.run(training.whereabouts, 4, args=given, nodes=2, processes=processes)
    assert [(each["rank"], each["nodes"]) for each in found] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert len({each["thread"] for each in found}) == (4 if not processes else len({each["thread"] for each in found}))
    assert len({each["pid"] for each in found} | {os.getpid()}) == (5 if processes else 1)
    number, tensors, others = found[0]["facts"]
    assert (number, tensors["a"].tolist(), others) == (7, [0, 1, 2], [None, "text"])


def test_what_processes_print_is_printed_here_by_rank(cluster: ClusterRunner, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.run(training.whereabouts, 2, processes=True)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] hello from rank 0", "[rank 1] hello from rank 1"]


@both
def test_a_function_may_block(cluster: ClusterRunner, processes: bool) -> None:
    assert cluster.run(training.blocking, 3, processes=processes) == [3.0, 3.0, 3.0]


@both
def test_a_failure_says_which_rank_raised_what(cluster: ClusterRunner, processes: bool) -> None:
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.fails_on_rank_1, 3, processes=processes)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 of 3 ranks failed, first rank 1: LookupError: no such column: price"
    assert lines[2].startswith(f'    File "{training.__file__}", line '), "the stack is that of the function, without what has called it"
    assert 'raise LookupError("no such column: price")' in str(caught.value)
    assert [line[:22] for line in lines if line.startswith("then ")] == ["then rank 0: PeerLost:", "then rank 2: PeerLost:"]
    assert "rank 1" in caught.value.of_rank(2).message
    assert isinstance(caught.value.of_rank(1).error, LookupError) is not processes


@pytest.mark.parametrize("skipping", [{0, 1}, {1}])
def test_a_skip_in_ranks_is_one_of_the_test(cluster: ClusterRunner, skipping: set[int]) -> None:
    """The other ranks fail only because they have lost a rank that skips."""

    async def train(cluster: Cluster) -> None:
        if cluster.rank in skipping:
            pytest.skip("not on this machine")
        await cluster.backend.barrier()

    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        cluster.run(train, 2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_skip_hides_no_failure(order: int) -> None:
    """Whichever of the two came first. (If the skip were raised here, it would skip this test instead of failing it.)"""
    skipped = RankFailure.of(pytest.skip.Exception("not on this machine"))
    assert RanksFailed([skipped, RankFailure.of(PeerLost("rank 0 is gone", 0))][::order], 2).skip is skipped.error
    assert RanksFailed([skipped, RankFailure.of(ValueError("a mistake"))][::order], 2).skip is None


def test_a_process_that_dies_of_itself_is_a_failure(cluster: ClusterRunner, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed, match=r"first rank 1: Died: the process was ended by SIGSEGV"):
        cluster.run(training.dies_on_rank_1, 2, processes=True)
    assert "[rank 1] last words" in capfd.readouterr().out


@pytest.mark.parametrize(("processes", "timeout_s"), [(False, 4.0), (True, 5.0)], ids=["threads", "processes"])
def test_who_hangs_is_shown_with_what_it_hangs_in(cluster: ClusterRunner, processes: bool, timeout_s: float) -> None:
    """timeout_s is enough for rank 0 to ask where rank 1 is (suspect_s). Rank 1 waits for no other rank, so it is shown first."""
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.one_waits_for_ever, 2, processes=processes, timeout_s=timeout_s)
    assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "Hung"), (0, "Hung")]
    assert str(caught.value).splitlines()[-1] == f"then rank 0: Hung: it had not ended after {timeout_s:g} s, and waits for rank 1"
    assert "one_waits_for_ever" in caught.value.first.traceback
    assert "barrier" in caught.value.of_rank(0).traceback
    assert cluster.run(training.blocking, 2, processes=processes) == [2.0, 2.0], "the next run is not disturbed"


def test_a_result_that_cannot_be_sent_is_refused(cluster: ClusterRunner) -> None:
    with pytest.raises(RanksFailed, match="UsageError: a value of type _MainThread cannot be kept or sent"):
        cluster.run(training.returns_a_thread, 1, processes=True)


def test_settings_reach_connect(cluster: ClusterRunner) -> None:
    with pytest.raises(RanksFailed, match=r"a worker that had not joined: UsageError: routing of connect\(\) must be one of"):
        cluster.run(training.train, 1, routing="scenic")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ({"world_size": 0}, "world_size must be a number of ranks, at least 1, got 0"),
        ({"world_size": "2"}, "world_size must be a number of ranks, at least 1, got '2'"),
        ({"world_size": True}, "world_size must be a number of ranks, at least 1, got True"),
        ({"world_size": 2, "colour": "red"}, r"connect\(\) has no setting colour"),
        ({"world_size": 2, "every": 3}, "are for elastic runs only"),
        ({"world_size": 2, "min_workers": 2}, "are for elastic runs only"),
        ({"world_size": 2, "elastic": True, "min_workers": 3}, "from 1 to 2, the number of ranks that begin, got 3"),
        ({"world_size": 2, "elastic": True, "min_workers": 0}, "min_workers must be from 1 to 2"),
        ({"world_size": 3, "nodes": 2}, "3 ranks cannot be spread evenly over 2 nodes"),
        ({"world_size": 4, "nodes": 0}, "4 ranks cannot be spread evenly over 0 nodes"),
        ({"world_size": 2, "args": 5}, "args must be a tuple or list"),
        ({"world_size": 2, "faults": ["kill"]}, "faults must be a Faults"),
        ({"world_size": 2, "elastic": True, "every": 0}, "every must be at least 1 step"),
        ({"world_size": 2, "timeout_s": float("inf")}, "timeout_s must be a finite number of seconds above 0"),
        ({"world_size": 2, "processes": True, "flight": Path("here")}, "a setting cannot be given to another process"),
        ({"world_size": 2, "job": "mine", "node": "here"}, "the settings must not include job, node"),
        ({"world_size": 2, "faults": Faults().join(at_step=1)}, "workers can join only an elastic run"),
        ({"world_size": 2, "faults": Faults().kill(rank=2, at_step=1)}, "there is no rank 2 among 2 ranks: kill rank 2 at step 1"),
        ({"world_size": 2, "faults": Faults().freeze(rank=1, at_step=1, seconds=1)}, "only a process can be frozen"),
    ],
)
def test_calls_that_make_no_sense(cluster: ClusterRunner, call: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        cluster.run(training.train, **call)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [training.leaves_a_child, training.forks_a_child])
def test_processes_that_a_rank_leaves_behind_are_not_waited_for(cluster: ClusterRunner, train: Any) -> None:
    begin_s = time.monotonic()
    (child,) = cluster.run(train, 1, processes=True)
    assert time.monotonic() - begin_s < 30.0
    os.kill(child, signal.SIGKILL)


@both
def test_an_error_without_a_text_is_one_too(cluster: ClusterRunner, processes: bool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: Odd: \(no text, because str\(\) of the error raised ZeroDivisionError\(\)\)"):
        cluster.run(training.raises_what_has_no_text, 1, processes=processes)


def test_when_the_process_that_makes_others_is_killed_there_is_another(cluster: ClusterRunner) -> None:
    runner = ClusterRunner()
    try:
        nursery = runner._forks()
        nursery._process.kill()
        nursery._process.wait()
        assert runner.run(training.blocking, 2, processes=True) == [2.0, 2.0]
    finally:
        runner.close()


def test_a_program_runs_clusters_of_its_own_functions(tmp_path: Path) -> None:
    """The processes of its ranks must not run what the program runs as `__main__`."""
    program = tmp_path / "program.py"
    program.write_text(
        "from shardnet.testing import ClusterRunner\n\n\n"
        "async def train(cluster):\n    return cluster.rank\n\n\n"
        "if __name__ == '__main__':\n    runner = ClusterRunner()\n    print(runner.run(train, 2, processes=True))\n    runner.close()\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_a_package_that_is_on_no_path(tmp_path: Path) -> None:
    """For example in pytest's importlib mode."""
    package = tmp_path / "checks" / "inner"
    package.mkdir(parents=True)
    (package / "helper.py").write_text("NUMBER = 7\n")
    (package / "test_it.py").write_text(
        "from .helper import NUMBER\n\n\nasync def train(cluster):\n    return NUMBER\n\n\n"
        "def test_it(cluster):\n    assert cluster.run(train, 2, processes=True) == [7, 7]\n"
    )
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    options = ("--import-mode=importlib", "-p", "no:asyncio", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "checks"], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout


def test_a_function_that_a_process_cannot_find(cluster: ClusterRunner) -> None:
    async def local(_: object) -> None:
        """No other process can import it."""

    for train in (local, lambda _: None, training.wrapped, training.Method().train):
        with pytest.raises(UsageError, match=r"cannot be found by another process; give a function that is defined at the top"):
            cluster.run(train, 1, processes=True)
