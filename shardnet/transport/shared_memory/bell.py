"""`Bell`: by which threads of this process call one that sleeps at mailboxes of others."""

import ctypes
import threading
from collections.abc import Mapping

from shardnet.transport.shared_memory import futex
from shardnet.transport.shared_memory.mailbox import MailboxView


class Bell:
    """A word beside those of the mailboxes, which only their owners can change: who has read its `count` before it looked around, and then
    waits, misses nothing. Safe to use from any thread."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self._address = ctypes.addressof(self._word)
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Another one whenever it has rung."""
        return self._word.value

    def ring(self) -> None:
        with self._lock:
            self._word.value += 1  # from the last number on it begins at 0 again
        futex.wake(self._address)

    def wait(self, heard: int, mailboxes: Mapping[MailboxView, int], timeout_s: float) -> None:
        """Sleep until `count` is not `heard` any more, or that of one of so many mailboxes less than `futex.most` is not what stands beside
        it, or for some time, or less."""
        futex.wait_any([(self._address, heard), *((view.address, seen) for view, seen in mailboxes.items())], timeout_s)
