"""`Ends`: the threads that complete futures, see [Note: futures] in work.py."""

from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Lock, local

NAME = "shardnet-futures"


class Ends:
    """Lives as long as a world. Any thread.

    Callbacks run on the thread that completes their future, one after the other, and may wait for collectives that they begin. So each
    thread completes only futures that other threads ask for: the thread of the next level completes a future that is asked for on the
    thread of one level. One pool of several threads would run callbacks of one level at the same time, and then every rank might begin
    their collectives in another order.
    """

    def __init__(self) -> None:
        self._threads: list[ThreadPoolExecutor] = []  # by level; each is made when a future is first asked for there
        self._lock = Lock()
        self._here = local()  # `level` of the current thread, if it is one of these
        self._closed = False

    def for_caller(self) -> Executor:
        """The thread that completes futures for the calling thread."""
        level = getattr(self._here, "level", -1) + 1
        with self._lock:
            if level == len(self._threads):
                self._threads.append(ThreadPoolExecutor(1, f"{NAME}-{level}", initializer=self._begin, initargs=(level,)))
                if self._closed:
                    self._threads[-1].shutdown()  # it takes no work, like those before it
            return self._threads[level]

    def shutdown(self, wait: bool = True) -> None:
        """Take no more work. Work that was taken is still done; `wait` says whether to wait for it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for each in threads:
            each.shutdown(wait)

    def _begin(self, level: int) -> None:
        self._here.level = level
