"""Guards around every test: a test must close what it has opened, and nothing may hold up an event loop.

Some things naturally die late (a socket whose peer is still closing, a thread that is ending), so only what is still there after looking
for GRACE_S counts as a leak. Whatever lives as long as the process by design is started before the first test.
"""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from shardnet.loop import LoopThread
from tests.loop_watch import LoopWatch
from tests.resources import Resources

GRACE_S = 5.0
LOOK_EVERY_S = 0.05
SHARED_LOOP_LIMIT_S = 2.0  # after a silence of this length a peer counts as lost
TEST_LOOP_LIMIT_S = 5.0  # a user's loop may compute: this is far above a step of any model in the tests, even on a busy machine


async def _thread_id() -> int:
    return threading.get_ident()


def pytest_collection_finish() -> None:
    """Freeze what has been imported: otherwise each garbage collection looks through it, which takes up to seconds in a long run."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Unfreeze it: if objects stayed frozen to the end, libraries that count their objects would report them as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def loop_watch() -> Iterator[LoopWatch]:
    """The watch over the process's shared loop; tests with a loop of their own add that loop to it."""
    shared = LoopThread.shared()
    with LoopWatch() as watch:
        watch.add(shared.loop, shared.run(_thread_id()).result(), SHARED_LOOP_LIMIT_S)
        yield watch


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> Iterator[None]:
    """Keeps gRPC's poller, which all channels and servers of the process share, from starting and ending with the tests.

    The poller ends when the last channel or server is freed, which may be after the test: a captured log record can hold an error, the
    error a frame, and the frame a server. An idle channel keeps it alive for the session.
    """
    shared = LoopThread.shared()
    channel = shared.run(idle_channel()).result()
    yield
    shared.run(channel.close()).result()


async def idle_channel() -> grpc.aio.Channel:
    return grpc.aio.insecure_channel("127.0.0.1:1")  # would connect at its first call, but there is none


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest, loop_watch: LoopWatch, grpc_poller: None) -> Iterator[None]:
    """Fails a test that leaks or that holds up a loop. Set up before all other fixtures of the test, torn down after them."""
    before = Resources()
    yield
    stalls = loop_watch.take_stalls()
    leaks = lasting_leaks(before)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)
    if stalls and not request.node.get_closest_marker("blocks_loop"):
        pytest.fail("an event loop was held up " + "\n".join(stalls), pytrace=False)


@pytest.fixture(autouse=True)
def guard_async(request: pytest.FixtureRequest, guard: None) -> None:
    """Guards the loop of an async test. Not in `guard`: pytest tears down a fixture that another one asks for by name after that one."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("guard_loop")


@pytest_asyncio.fixture
async def guard_loop(loop_watch: LoopWatch) -> AsyncIterator[None]:
    """Watches the test's own loop, and fails a test that leaves tasks on it."""
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    loop_watch.add(loop, threading.get_ident(), TEST_LOOP_LIMIT_S)
    yield
    loop_watch.remove(loop)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        pytest.fail("the test left tasks running:\n  " + "\n  ".join(map(repr, left)), pytrace=False)


def lasting_leaks(before: Resources) -> list[str]:
    """What the process holds beyond `before` even after GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    leaks = Resources().beyond(before)
    while leaks and time.monotonic() < deadline:
        gc.collect()
        time.sleep(LOOK_EVERY_S)
        leaks = Resources().beyond(before)
    return leaks
