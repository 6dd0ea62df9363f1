"""What processes need, as the kernel reports it: memory, and bytes through the loopback interface."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 0.05


def loopback_bytes() -> int:
    """All bytes that this machine has ever sent to itself, IP headers included; in a packet of 64 KiB those are negligible."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise OSError("/proc/net/dev has no line for lo")


@contextmanager
def watched(pids: Callable[[], Iterable[int]]) -> Iterator[list[int]]:
    """The most memory that these processes have had together so far, in bytes; memory that several share counts once."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], sum(map(_proportional_bytes, pids())))
            if over.wait(INTERVAL_S):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with its share of shared pages; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
