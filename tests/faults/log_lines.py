"""What shardnet has logged, as text: a record would keep the error that it tells of, and with it all that the error has seen."""

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
    """Its warnings and errors from now on, which nobody else hears."""
    ear, log = _Ear(), logging.getLogger("shardnet")
    log.addHandler(ear)
    log.propagate = False
    try:
        yield ear.lines
    finally:
        log.propagate = True
        log.removeHandler(ear)
