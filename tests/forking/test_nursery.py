"""`Nursery`: a process that forks others. What forked processes find is tested where they run programs (tests/cli/test_run_start.py)."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardnet.forking.nursery import Nursery

SERVER = """
import errno, os, sys, threading
from shardnet.forking.server import serve

fork, refused = os.fork, []

def fork_the_second_time():
    if not refused:
        refused.append(True)
        raise OSError(errno.EAGAIN, "no room")
    return fork()

if sys.argv[1:] == ["threads"]:
    threading.Thread(target=threading.Event().wait, name="of a library", daemon=True).start()
if sys.argv[1:] == ["full"]:
    os.fork = fork_the_second_time
forked = serve(sessions=True)
if forked is not None:
    number, *texts = forked.task
    for descriptor in forked.descriptors:
        os.write(descriptor, repr(texts).encode())
    print("out", file=sys.stdout, flush=True)
    os.kill(os.getpid(), 15) if number == "killed" else os._exit(int(number))
"""


@pytest.fixture
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    nursery = Nursery([sys.executable, "-c", SERVER, *getattr(request, "param", [])], os.environ)
    yield nursery
    nursery.close()


def test_it_tells_what_is_to_be_done_and_how_that_ended(nursery: Nursery) -> None:
    nursery.wait_until_ready()
    out, report = os.pipe(), os.pipe()
    pid = nursery.fork("7", "a\nb", "", "\udcff", descriptors=(0, out[1], 2, report[1]))
    killed = nursery.fork("killed")
    for descriptor in (out[1], report[1]):
        os.close(descriptor)
    assert (nursery.wait(pid), nursery.wait(killed)) == (7, -signal.SIGTERM)
    assert os.read(out[0], 100) == b"out\n"
    assert os.read(report[0], 100) == repr(["a\nb", "", "\udcff"]).encode()
    assert os.read(report[0], 100) == b"", "the process that forks has closed its own"
    for descriptor in (out[0], report[0]):
        os.close(descriptor)


@pytest.mark.parametrize("nursery", [["full"]], indirect=True)
def test_a_system_without_room_for_another_process_says_so_once(nursery: Nursery) -> None:
    with pytest.raises(OSError, match="no process could be forked") as caught:
        nursery.fork("0")
    assert caught.value.errno == errno.EAGAIN
    assert nursery.wait(nursery.fork("3")) == 3


def test_a_process_with_threads_is_not_forked() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", SERVER, "threads"], stdin=theirs.fileno(), stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert "RuntimeError: cannot fork while other threads run, " in ended.stderr
    assert "; threads: MainThread, of a library" in ended.stderr


def test_a_process_leads_its_group_as_soon_as_it_is_there(nursery: Nursery) -> None:
    for _ in range(20):
        pid = nursery.fork("killed")
        assert os.getpgid(pid) == os.getsid(pid) == pid
        nursery.wait(pid)
