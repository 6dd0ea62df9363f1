"""`Nursery`: a process that forks others. What forked processes find is tested where they run programs (tests/cli/test_run_start.py)."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
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
    if number == "for ever":
        threading.Event().wait()
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


@pytest.mark.parametrize("reason", [TimeoutError, KeyboardInterrupt])
def test_a_request_without_an_answer_is_the_last(nursery: Nursery, reason: type[BaseException]) -> None:
    """The next request would take the late answer for its own: a pid for an exit status. And a late pid would have no owner."""
    forked = os.pidfd_open(nursery.fork("for ever"))
    nursery._process.send_signal(signal.SIGSTOP)
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2))
    if reason is KeyboardInterrupt:
        interrupt.start()
    try:
        with pytest.raises(reason):
            nursery._ask("fork", "7", within_s=0.1 if reason is TimeoutError else 45.0)
    finally:
        if reason is KeyboardInterrupt:
            interrupt.join()
        signal.signal(signal.SIGUSR2, before)
    assert nursery.ended
    assert select.select([forked], [], [], 10.0)[0], "it has outlived the process that has forked it"
    os.close(forked)
    with pytest.raises(ConnectionError, match=r"the fork server \(pid \d+\) was ended, because it had left a request unanswered"):
        nursery.fork("3")


def test_a_request_that_cannot_be_sent_ends_nothing(nursery: Nursery) -> None:
    with pytest.raises(OSError, match="Message too long"):
        nursery.fork("x" * 2**20)
    assert nursery.wait(nursery.fork("3")) == 3


def test_a_process_leads_its_group_as_soon_as_it_is_there(nursery: Nursery) -> None:
    for _ in range(20):
        pid = nursery.fork("killed")
        assert os.getpgid(pid) == os.getsid(pid) == pid
        nursery.wait(pid)
