"""The guards must fail the tests that they are for, and pass all others: each sample runs in a fresh pytest with the guards loaded."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent

SAMPLES = """
import asyncio, os, socket, subprocess, sys, threading, time
from pathlib import Path
import pytest
from shardnet.loop import LoopThread
from tests import guards, loop_watch

guards.GRACE_S = guards.SHARED_LOOP_LIMIT_S = guards.TEST_LOOP_LIMIT_S = 0.3
loop_watch.BUSY_S = 0.2

kept = []

def test_opens_nothing():
    pass

def test_leaks_a_socket():
    kept.append(socket.socket())

def test_leaks_a_file():
    kept.append(open(os.devnull))

def test_leaks_a_thread():
    release = threading.Event()
    kept.append(release)
    threading.Thread(target=release.wait, name="forgotten", daemon=True).start()

def test_leaks_a_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_leaks_a_zombie():
    kept.append(subprocess.Popen(["true"]))

def test_leaks_shared_memory():
    # Held open: other test runs on this machine must see that it is not theirs. Named so that only the run that began this one removes it.
    kept.append(Path("/dev/shm", f"shardnet-guard-sample-{os.getppid()}").open("w"))

def test_leaks_a_task_on_the_shared_loop():
    kept.append(LoopThread.shared().run(asyncio.sleep(60)))

async def test_leaks_a_task():
    kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(60)))

async def test_blocks_its_loop():
    time.sleep(1.5)

def test_blocks_the_shared_loop():
    async def block():
        time.sleep(1.5)
    LoopThread.shared().run(block()).result()

@pytest.mark.blocks_loop
async def test_blocks_its_loop_with_leave():
    time.sleep(1.5)

async def test_keeps_its_loop_busy_with_short_callbacks():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        await asyncio.sleep(0)

def test_holds_a_thread_that_ends_a_little_late():
    threading.Thread(target=time.sleep, args=(0.1,)).start()

@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    yield ours
    ours.close()
    theirs.close()

async def test_closes_what_it_opened(connection):
    await asyncio.wait_for(asyncio.sleep(0), 1)
"""

FAILURES = {
    "test_leaks_a_socket": "descriptor socket:",
    "test_leaks_a_file": "descriptor /dev/null",
    "test_leaks_a_thread": "thread forgotten",
    "test_leaks_a_process": "input()",
    "test_leaks_a_zombie": "(zombie)",
    "test_leaks_shared_memory": "\n  /dev/shm/shardnet-guard-sample-",
    "test_leaks_a_task_on_the_shared_loop": "task Task-",
    "test_leaks_a_task": "left tasks running",
    "test_blocks_its_loop": "time.sleep(1.5)",
    "test_blocks_the_shared_loop": "time.sleep(1.5)",
}
PASSES = (
    "test_opens_nothing",
    "test_blocks_its_loop_with_leave",
    "test_keeps_its_loop_busy_with_short_callbacks",
    "test_holds_a_thread_that_ends_a_little_late",
    "test_closes_what_it_opened",
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the guards said about each sample; empty if they said nothing."""
    directory = tmp_path_factory.mktemp("guards")
    (directory / "test_samples.py").write_text(SAMPLES)
    arguments = ["-p", "tests.guards", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", f"--junitxml={directory / 'verdicts.xml'}"]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *arguments, str(directory)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=50,
        )
    finally:
        Path("/dev/shm", f"shardnet-guard-sample-{os.getpid()}").unlink(missing_ok=True)
    assert run.returncode == 1, run.stdout + run.stderr
    cases = ElementTree.parse(directory / "verdicts.xml").iter("testcase")
    return {case.attrib["name"]: "\n".join(error.text or "" for error in case) for case in cases}


@pytest.mark.parametrize(("sample", "reason"), FAILURES.items(), ids=FAILURES)
def test_the_guards_fail_what(verdicts: dict[str, str], sample: str, reason: str) -> None:
    assert reason in verdicts[sample]


@pytest.mark.parametrize("sample", PASSES)
def test_the_guards_leave_alone_what(verdicts: dict[str, str], sample: str) -> None:
    assert verdicts[sample] == ""


def test_every_sample_is_judged(verdicts: dict[str, str]) -> None:
    assert set(verdicts) == {*FAILURES, *PASSES}
