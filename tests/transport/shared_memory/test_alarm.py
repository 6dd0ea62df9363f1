"""The alarm by which a thread sleeps that others may turn out not to need."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardnet.transport.shared_memory import Alarm, alarm

pytestmark = pytest.mark.skipif(not alarm.available, reason="needs timers that can be read (Linux)")

NEVER_S = 60.0


@contextmanager
def alarm_after(delay_s: float) -> Iterator[Alarm]:
    before = _descriptors()
    made = Alarm(delay_s)
    try:
        yield made
    finally:
        made.close()
    assert _descriptors() == before


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would keep a descriptor open meanwhile


class Sleeper(threading.Thread):
    def __init__(self, by: Alarm) -> None:
        super().__init__(daemon=True)
        self._by = by
        self.start()

    def run(self) -> None:
        self._by.sleep()


def test_it_goes_off_after_its_delay() -> None:
    with alarm_after(0.05) as one:
        start = time.monotonic()
        one.set()
        one.sleep()
        assert time.monotonic() - start >= 0.05


def test_it_can_be_disarmed_and_set_again() -> None:
    with alarm_after(0.05) as one:
        one.set()
        one.disarm()
        sleeper = Sleeper(one)
        sleeper.join(0.2)
        assert sleeper.is_alive()
        one.set()
        sleeper.join(10.0)
        assert not sleeper.is_alive()


@pytest.mark.parametrize("is_set", [True, False])
def test_it_rings_at_once(is_set: bool) -> None:
    with alarm_after(NEVER_S) as one:
        sleeper = Sleeper(one)
        if is_set:
            one.set()
        one.ring()
        sleeper.join(10.0)
        assert not sleeper.is_alive()


def test_who_comes_late_does_not_sleep() -> None:
    """The alarm has already gone off."""
    with alarm_after(NEVER_S) as one:
        one.ring()
        one.sleep()


def test_it_goes_off_once() -> None:
    with alarm_after(0.01) as one:
        one.set()
        one.sleep()
        sleeper = Sleeper(one)
        sleeper.join(0.1)
        assert sleeper.is_alive()
        one.ring()
        sleeper.join(10.0)
