"""Tests that use gRPC run on the process's one loop, because grpc.aio works with only one."""

import functools
from collections.abc import Callable, Coroutine
from typing import ParamSpec

from shardnet.loop import LoopThread

P = ParamSpec("P")

LIMIT_S = 50.0  # below pytest's own limit, so that the test's own `finally` closes what it has opened


def on_shared_loop(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Make a coroutine function a test that runs on shardnet's loop thread while pytest's thread waits."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        running = LoopThread.shared().run(test(*args, **kwargs))
        try:
            running.result(LIMIT_S)
        except TimeoutError:
            running.cancel()
            raise

    return run
