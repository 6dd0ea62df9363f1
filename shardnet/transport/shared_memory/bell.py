"""`Bell`: with it, threads of this process wake a thread that sleeps at the mailboxes of other ranks."""

import ctypes
import threading
from collections.abc import Mapping

from shardnet.transport.shared_memory import futex
from shardnet.transport.shared_memory.mailbox import MailboxView


class Bell:
    """A futex word of this process, because only their owners can change the words of mailboxes. A thread that reads `count` first, then
    looks for news, and then waits misses no ring. Safe to use from any thread."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self._address = ctypes.addressof(self._word)
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """A number that changes whenever the bell rings."""
        return self._word.value

    def ring(self) -> None:
        with self._lock:
            self._word.value += 1  # after the highest number it begins at 0 again
        futex.wake(self._address)

    def wait(self, heard: int, mailboxes: Mapping[MailboxView, int], timeout_s: float) -> None:
        """Sleep until `count` is no longer `heard`, or the count of one of the mailboxes is no longer the given one, at most `timeout_s`;
        may return early. There must be fewer mailboxes than `futex.most`."""
        futex.wait_any([(self._address, heard), *((view.address, seen) for view, seen in mailboxes.items())], timeout_s)
