"""`Ends`: the threads that end futures, see [Note: futures] in work.py."""

from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Lock, local

NAME = "shardnet-futures"


class Ends:
    """Lives as long as a world. Any thread.

    Callbacks run on the thread that ends their future, one after the other, and may wait for collectives that they begin. So each thread
    ends only what others ask for: a future that is asked for on the thread of one level is ended by that of the next. One pool of several
    threads would run callbacks of one level at the same time, and collectives that they begin would come in another order on every rank.
    """

    def __init__(self) -> None:
        self._threads: list[ThreadPoolExecutor] = []  # by level; one is made when somebody asks for a future there
        self._lock = Lock()
        self._here = local()  # level: of the thread that this is, where it is one of these
        self._closed = False

    def for_caller(self) -> Executor:
        """The thread that ends what the calling one may wait for."""
        level = getattr(self._here, "level", -1) + 1
        with self._lock:
            if level == len(self._threads):
                self._threads.append(ThreadPoolExecutor(1, f"{NAME}-{level}", initializer=self._begin, initargs=(level,)))
                if self._closed:
                    self._threads[-1].shutdown()  # takes nothing, as those before it
            return self._threads[level]

    def shutdown(self, wait: bool = True) -> None:
        """Take nothing any more. What was taken is done; `wait` for it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for each in threads:
            each.shutdown(wait)

    def _begin(self, level: int) -> None:
        self._here.level = level
