"""`Tracker`: takes records and hands them on, without holding up the caller."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shardnet.training.tracking.json_lines import JsonLines
from shardnet.training.tracking.record import Record
from shardnet.training.tracking.tensorboard import TensorBoard

log = logging.getLogger(__name__)

Callback = Callable[[int, Mapping[str, float]], object]


class _Sink(Protocol):
    """Where records go. It is named by its str()."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Function:
    """A user's own function, for other trackers."""

    def __init__(self, function: Callback) -> None:
        self._function = function

    def __str__(self) -> str:
        return f"the function {getattr(self._function, '__qualname__', self._function)}"

    def write(self, record: Record) -> None:
        self._function(record.step, record.metrics)

    def close(self) -> None:
        pass


class Tracker:
    """Hands records to all sinks. Lives as long as its cluster; begins nothing before the first record.

    A thread of its own writes, in order: a slow disk must not hold up steps. If a sink cannot write, that is logged and the sink gets
    no more records; the training goes on.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where files go; None: nowhere."""
        self._sinks: list[_Sink] = []
        if folder is not None:
            self._sinks.append(JsonLines(folder))
            if TensorBoard.is_installed():
                self._sinks.append(TensorBoard(folder))
        self._thread: ThreadPoolExecutor | None = None

    def add(self, function: Callback) -> None:
        """Have the function called with the step and the metrics, on the tracker's thread."""
        self._sinks.append(_Function(function))

    def take(self, record: Record) -> None:
        """Hand a record on; returns at once."""
        if not self._sinks:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardnet-tracker")
        self._thread.submit(self._write, record)

    def close(self) -> None:
        """Wait until all is written."""
        if self._thread is not None:
            self._thread.submit(self._close_all)
            self._thread.shutdown(wait=True)
            self._thread = None

    def _write(self, record: Record) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - the user's function, a full disk: no reason to end a training
                log.error("metrics no longer go to %s: %s: %s", sink, type(error).__name__, error)
                self._sinks.remove(sink)
                with suppress(OSError):  # once more the same
                    sink.close()

    def _close_all(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                log.error("the last metrics may be missing from %s: %s", sink, error)
