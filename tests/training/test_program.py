"""How a program ends after a signal has interrupted it."""

import gzip
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shardnet
from shardnet.errors import UsageError
from tests.cli.launched import Launched

PROGRAM = """
import asyncio, atexit, gzip, sys, threading, time
import shardnet

class Freed:
    def __del__(self):
        print("freed")

async def main():
    print("begun", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")

def late():
    threading.main_thread().join()
    print("a thread")

freed = Freed()
text = open("text", "w")
text.write("words")
squeezed = gzip.open("squeezed", "wt")
squeezed.write("more words")
threading.Thread(target=late).start()
atexit.register(print, "at exit")
try:
    shardnet.run(main)
except ZeroDivisionError if len(sys.argv) == 1 else SystemExit as interrupted:
    print("caught", interrupted.code)
    sys.exit(7)
finally:
    print("finally")
"""
ENDED = ["begun", "cleaned up", "finally", "a thread", "at exit"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_that_python_promises_is_done_and_nothing_else(number: signal.Signals, tmp_path: Path) -> None:
    assert _interrupt(number, tmp_path) == (128 + number, ENDED)


def test_who_catches_it_goes_on_as_ever(tmp_path: Path) -> None:
    assert _interrupt(signal.SIGINT, tmp_path, "catch") == (7, [*ENDED[:2], "caught 130", *ENDED[2:], "freed"])


def test_it_returns_what_the_program_does_in_any_thread() -> None:
    async def main() -> int:
        return 42

    with ThreadPoolExecutor(1) as other:
        assert other.submit(shardnet.run, main).result() == 42
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert shardnet.run(main) == 42
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


async def test_within_a_loop_it_says_what_to_write_instead() -> None:
    async def main() -> None:
        """Never begun."""

    with pytest.raises(UsageError, match=r"an event loop runs in this thread already, as in a notebook: write `await main\(\)`"):
        shardnet.run(main)


CHILDREN = """
import asyncio, multiprocessing, os, signal, sys, time
import shardnet, torch

def forked(then):
    child = os.fork()
    if child == 0:
        then()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def raises():
    raise ValueError("in a child")

def sleeps(begun):
    begun.set()
    for _ in range(6000):
        time.sleep(0.01)  # in pieces: Python does not see a signal that comes when it is about to sleep before it has slept

async def main():
    async with shardnet.connect() as cluster:
        mine = torch.ones(2)
        model = await cluster.shard(torch.nn.Linear(2, 1))
        await model(mine)

        def joins_in():
            cluster.backend.all_reduce(mine).wait()

        def computes():
            asyncio.run(model.run(model.fsdp, mine))

        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:  # its end terminates its workers
            assert pool.map(abs, range(-3, 0)) == [3, 2, 1]
        for number, status in ((signal.SIGTERM, -15), (signal.SIGINT, 1)):
            begun = fork.Event()
            child = fork.Process(target=sleeps, args=(begun,))
            child.start()
            begun.wait()
            os.kill(child.pid, number)
            child.join()
            assert child.exitcode == status
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the program sets itself is its children's, too
        assert forked(lambda: os._exit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)) == 1
        signal.signal(signal.SIGINT, before)
        for then in (lambda: sys.exit("bad"), raises, joins_in, computes):
            assert forked(then) == 1
        assert forked(lambda: sys.exit(5)) == 5
        assert forked(sys.exit) == 0
        if os.fork() == 0:
            return "a child's"  # as if it were the program
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        for _ in range(3):
            assert (await cluster.backend.all_reduce(mine)).tolist() == [2.0, 2.0]
            await asyncio.sleep(0.1)  # what a child has done may take a moment to do harm
    return "the program's"

print("returned", shardnet.run(main), flush=True)
"""


def test_children_that_a_program_forks_do_their_parents_no_harm(tmp_path: Path) -> None:
    """A signal sent to a child is for the child alone, and the child has no part in the cluster that it inherits."""
    (tmp_path / "program.py").write_text(CHILDREN)
    with Launched(tmp_path, "run", "--nproc", "2", "program.py") as run:
        result = run.finish()
    assert result.status == 0, result
    assert result.out.count("returned the program's") == 2
    assert result.out.count("returned") == 2
    assert "ValueError: in a child" in result.err
    assert result.err.count("this process was forked from a rank and has no part in the cluster") >= 2


LOADERS = """
import shardnet, torch
from torch.utils.data import DataLoader, TensorDataset

async def main():
    async with shardnet.connect():
        seen = [int(batch[0].sum()) for _ in range(6) for batch in DataLoader(TensorDataset(torch.arange(64)), 16, num_workers=2)]
    print("seen", sum(seen), flush=True)

shardnet.run(main)
"""


def test_workers_of_a_loader_live_beside_a_rank_that_is_alone(tmp_path: Path) -> None:
    """It has no streams, which would keep gRPC's fork handlers from running."""
    (tmp_path / "program.py").write_text(LOADERS)
    with Launched(tmp_path, "run", "--nproc", "1", "program.py") as run:
        result = run.finish()
    assert (result.status, result.out.split()[-2:]) == (0, ["seen", str(6 * sum(range(64)))]), result


def test_a_coroutine_in_place_of_the_function_is_refused_in_words() -> None:
    """asyncio.run wants a coroutine, so users type one by habit."""

    async def main() -> None:
        raise AssertionError("never")

    with pytest.raises(UsageError, match=r"shardnet\.run\(main\), not shardnet\.run\(main\(\)\)"):
        shardnet.run(main())  # type: ignore[arg-type]


def _interrupt(number: signal.Signals, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Interrupt a program; return its exit status and output, and check that its files are complete."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(number)
        rest, errors = process.communicate()
    assert errors == ""
    assert (folder / "text").read_text() == "words"
    with gzip.open(folder / "squeezed", "rt") as file:
        assert file.read() == "more words"
    return process.returncode, (said + rest).splitlines()
