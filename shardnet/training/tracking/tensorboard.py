"""`TensorBoard`: event files, where `tensorboard` is installed (the extra `shardnet[tensorboard]`)."""

import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from shardnet.training.tracking.record import Record

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter


class TensorBoard:
    """Event files, the first made at the first record. It replaces that step and all later ones of an earlier run. Where a run goes back,
    another file replaces what was written so far from that step on. A second report of a step adds to the first.

    TensorBoard's own writer has a thread, which prints a traceback if the disk is full; and it reads files in the order of their names,
    which that writer does not keep if it makes ten files in a second.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._writer: RecordWriter | None = None  # into that file
        self._last: Record | None = None

    def __str__(self) -> str:
        return f"TensorBoard's events in {self._folder}"

    @staticmethod
    def is_installed() -> bool:
        return find_spec("tensorboard") is not None

    def write(self, record: Record) -> None:
        """Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._last is None or _goes_back(self._last, record):
            self._begin(record)
        self._last = record
        assert self._file is not None
        assert self._writer is not None
        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.metrics.items()]
        self._writer.write(Event(wall_time=record.at_s, step=record.step, summary=Summary(value=values)).SerializeToString())
        self._file.flush()

    def _begin(self, record: Record) -> None:
        """Make a file, from whose first step on no other one counts."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("xb")
        self._writer = RecordWriter(self._file)
        for event in (Event(file_version="brain.Event:2"), Event(session_log=SessionLog(status=SessionLog.START))):
            event.wall_time, event.step = record.at_s, record.step
            self._writer.write(event.SerializeToString())

    def close(self) -> None:
        """Raises OSError if something could not be written; the file is closed all the same."""
        if self._file is not None:
            self._file.close()


def _goes_back(last: Record, now: Record) -> bool:
    """Whether a step is done again. The next epoch may begin with the very step that the last one has ended with."""
    return now.step < last.step or (now.step == last.step and now.epoch != last.epoch)
