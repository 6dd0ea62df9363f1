"""The last resort against a test that hangs: its process ends, and says where every thread was.

pytest-timeout ends a test that takes too long by raising an error in it. That needs the interpreter, which code in C may never enter
again, and pytest-timeout watches no longer once a test has failed: one that fails and then hangs in the end of a fixture, or of its event
loop, would hang for ever. That ends the whole run, under pytest-xdist too (see the Makefile).
"""

import faulthandler
import os

import pytest
import pytest_timeout

LATER_S = 60.0  # than pytest-timeout; and this long may the end of a test take

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # while a test runs, 2 is what pytest catches its output with


def pytest_unconfigure(config: pytest.Config) -> None:
    if (stderr := config.stash.get(_stderr, None)) is not None:
        os.close(stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    _watch(item, settings.timeout + LATER_S)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    """The test is over, or it has failed."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _watch(item, LATER_S)


def _watch(item: pytest.Item, within_s: float) -> None:
    if not pytest_timeout.is_debugging():
        faulthandler.dump_traceback_later(within_s, exit=True, file=item.config.stash[_stderr])
