"""What shardnet has logged, as text: a log record would keep its error alive, and with it everything in the error's traceback."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Line(NamedTuple):
    at_s: float
    text: str  # with the traceback, if there is one


class _Ear(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(Line(time.monotonic(), self.format(record)))


@contextmanager
def heard_lines() -> Iterator[list[Line]]:
    """Shardnet's warnings and errors from now on, which reach no other handler."""
    ear, log = _Ear(), logging.getLogger("shardnet")
    log.addHandler(ear)
    log.propagate = False
    try:
        yield ear.lines
    finally:
        log.propagate = True
        log.removeHandler(ear)
