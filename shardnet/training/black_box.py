"""`BlackBox`: what a rank's last collectives were, in a file that outlives the process."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from shardnet.errors import CollectiveError, ProtocolError
from shardnet.flight import Flight
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.version import VERSION

log = logging.getLogger(__name__)

_JOB_CHARACTERS = 100  # of a job's name, in a file's name, which may have 255 bytes
_TRIES = 1000  # for a free name; whoever keeps more files of one job should look at them

Row = dict[str, Any]


class BlackBox:
    """Writes one rank's flight recorder to a file when a collective fails, once per epoch; lives as long as its station.

    One JSON object per line: first what failed, then the last collectives, oldest first, as they were at that moment. A thread of its
    own writes the file, since a slow disk must not hold up heartbeats. A failure to write is logged and raises no error.
    """

    def __init__(self, folder: Path, job: str, telemetry: Telemetry, topology: Callable[[], Topology]) -> None:
        self._folder = folder
        self._job = job
        self._telemetry = telemetry
        self._topology = topology  # of the newest epoch
        self._epochs: set[int] = set()  # that have failed; used on the loop thread only, where all failures are reported
        self._writing: list[threading.Thread] = []
        telemetry.flights.on_failure = self._on_failure

    def close(self) -> None:
        """Wait until all is written."""
        self._telemetry.flights.on_failure = None
        while self._writing:
            self._writing.pop().join()

    def _on_failure(self, flight: Flight, error: BaseException) -> None:
        epoch = flight.party.epoch
        if epoch in self._epochs or not isinstance(error, CollectiveError | ProtocolError):
            return
        self._epochs.add(epoch)
        rows = [self._head(flight, error), *map(self._row, self._telemetry.flights.last())]  # now: they change
        # no daemon: a program that ends because of the error must not end before the file is written
        thread = threading.Thread(target=self._write, args=(self._path(epoch), rows, str(error)), name="shardnet-black-box")
        self._writing.append(thread)
        thread.start()

    def _path(self, epoch: int) -> Path:
        job = re.sub(r"[^\w.-]", "_", self._job, flags=re.ASCII)[:_JOB_CHARACTERS]
        return self._folder / f"flight-{job}-epoch{epoch}-rank{self._topology().rank}.jsonl"

    def _head(self, flight: Flight, error: BaseException) -> Row:
        topology = self._topology()
        return {
            "job": self._job,
            "epoch": flight.party.epoch,
            "rank": topology.rank,
            "world_size": topology.world_size,
            "address": topology.me.address,
            "step": self._telemetry.step,
            "at": time.time(),
            "failed": flight.name,
            "error": type(error).__name__,
            "message": str(error),
            "version": VERSION,
        }

    def _row(self, flight: Flight) -> Row:
        party = flight.party
        return {
            "epoch": party.epoch,
            "group": f"{party.group:#x}",
            "members": party.members,
            "sequence": flight.sequence,
            "op": flight.op,
            "label": flight.label,
            "step": flight.step,
            "bytes_sent": flight.bytes_sent,
            "state": flight.state,
            "error": flight.error,
            "begun_at": self._wall_s(flight.begun_ns),
            "entered_at": self._wall_s(flight.entered_ns),
            "ended_at": self._wall_s(flight.ended_ns),
        }

    def _wall_s(self, counter_ns: int) -> float | None:
        """Seconds since 1970, comparable over ranks; None for what has not happened yet."""
        return (counter_ns + self._telemetry.epoch_offset_ns) / 1e9 if counter_ns else None

    def _write(self, wanted: Path, rows: Iterable[Row], message: str) -> None:
        try:
            with _create(wanted) as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            log.error("%s; this rank's last collectives cannot be written to %s: %s", message, wanted, error.strerror)
        else:
            log.error("%s; this rank's last collectives are in %s", message, file.name)


def _create(wanted: Path) -> TextIO:
    """A new file of this name, or, if it exists already (from another run), with a number after the name. Raises OSError."""
    for number in range(1, _TRIES + 1):
        path = wanted if number == 1 else wanted.with_suffix(f".{number}{wanted.suffix}")
        try:
            return path.open("x")
        except FileExistsError as error:
            last = error
    raise last
