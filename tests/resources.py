"""`Resources`: what a process holds at one moment and must give back: descriptors, threads, children, shared memory, tasks."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from shardnet.loop import THREAD_NAME, LoopThread

# Threads that outlive tests by design, by the beginning of their names: the shared event loop, its executor (each kind of loop names it
# differently), and threads that Python did not start (the autograd engine's).
LASTING_THREADS = (THREAD_NAME, "asyncio_", "uvloop_", "Dummy-")
GRPC_POLLER = "_poll_wrapper"  # in the name of grpc.aio's thread, which lives as long as any channel of the process

SHARED_MEMORY = Path("/dev/shm")


class Resources:
    """A snapshot of what this process holds, as names with counts."""

    def __init__(self) -> None:
        self._found = Counter[str]()
        for kind in (_descriptors, _threads, _children, _shared_memory, _tasks):
            self._found.update(kind())

    def beyond(self, before: "Resources") -> list[str]:
        """Descriptions of what this snapshot has and `before` had not."""
        extra = self._found - before._found
        return sorted(_describe(name, count) for name, count in extra.items() if not belongs_to_a_stranger(name))


def open_files() -> Iterator[str]:
    """The targets of all descriptors of this process."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path.iterdir would keep a descriptor open meanwhile
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            yield os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115 - a link to no path


def _descriptors() -> Iterator[str]:
    return (f"descriptor {target}" for target in open_files())


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not thread.name.startswith(LASTING_THREADS) and GRPC_POLLER not in thread.name:
            yield f"thread {thread.name} ({thread.ident})"


def _children() -> Iterator[str]:
    """Direct children; asking the kernel for them takes a tenth of the time of reading every process's parent."""
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - as above
        try:
            yield from (f"process {pid}" for pid in Path(f"/proc/self/task/{thread}/children").read_text().split())
        except FileNotFoundError:  # the thread ended meanwhile
            continue


def _shared_memory() -> Iterator[str]:
    return (str(path) for path in SHARED_MEMORY.glob("*"))


def _tasks() -> Iterator[str]:
    """Tasks on the shared loop: a test must end each task that it owns."""
    try:
        # Asked on the loop itself, after everything that was handed over to it before: a task may be on its way there.
        return iter(LoopThread.shared().run(_tasks_here()).result(timeout=1.0))
    except TimeoutError:
        return iter(["task that blocks the shared loop"])


async def _tasks_here() -> list[str]:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return [f"task {task.get_name()} in {task.get_coro()}" for task in others]


def _describe(name: str, count: int) -> str:
    kind, _, value = name.partition(" ")
    if kind == "process":
        name += _describe_process(int(value))
    return name if count == 1 else f"{name} ({count} times)"


def _describe_process(pid: int) -> str:
    try:
        return f": {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.ZombieProcess:
        return " (zombie): ended, and nobody waited for it"
    except psutil.NoSuchProcess:
        return " (just ended)"


def belongs_to_a_stranger(name: str) -> bool:
    """Whether another process than ours uses a name in /dev/shm: another test run on the same machine."""
    if not name.startswith(f"{SHARED_MEMORY}/"):
        return False
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return any(_uses(process.pid, name) for process in psutil.process_iter() if process.pid not in ours)


def _uses(pid: int, path: str) -> bool:
    try:
        if path in Path(f"/proc/{pid}/maps").read_text():
            return True
        return any(os.readlink(link) == path for link in Path(f"/proc/{pid}/fd").iterdir())  # noqa: PTH115
    except OSError:  # it has ended, or this user may not look at it
        return False
