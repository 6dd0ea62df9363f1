"""What a rendezvous saves, so that it can be restarted while its jobs run."""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardnet.errors import UsageError
from shardnet.rendezvous.request import JoinRequest

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, epoch INTEGER NOT NULL,
    min_world_size INTEGER NOT NULL, max_world_size INTEGER NOT NULL, elastic INTEGER NOT NULL, ended INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS members (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE, rank INTEGER NOT NULL,
    incarnation TEXT NOT NULL, address TEXT NOT NULL, node TEXT NOT NULL, local_rank_hint INTEGER NOT NULL, identity TEXT NOT NULL,
    gone INTEGER NOT NULL,
    PRIMARY KEY (job, rank)
) STRICT;
"""
VERSION = 3  # of the tables


@dataclass(frozen=True, slots=True)
class SavedJob:
    """A job that has run: its last epoch, and the members of that epoch with their ranks, if it still runs."""

    name: str
    epoch: int
    min_world_size: int
    max_world_size: int
    elastic: bool
    ended: bool  # its training is over
    members: tuple[tuple[int, JoinRequest], ...]
    gone: tuple[tuple[int, JoinRequest], ...] = ()  # members of that epoch that have vanished, or have joined again for the next one


class Store(Protocol):
    """Saves jobs. Called on the loop, whenever the members of an epoch change, so the calls must be short."""

    def load(self) -> Sequence[SavedJob]:
        """All jobs that were saved and not dropped."""

    def save(self, job: SavedJob) -> None:
        """Save a job in place of its older version. A failure to write is logged, and the jobs go on all the same."""

    def drop(self, name: str) -> None:
        """Delete a job, and handle failures in the same way."""

    def close(self) -> None: ...


class NoStore:
    """Saves nothing: a restarted rendezvous knows no workers."""

    def load(self) -> Sequence[SavedJob]:
        return ()

    def save(self, job: SavedJob) -> None: ...

    def drop(self, name: str) -> None: ...

    def close(self) -> None: ...


class SqliteStore:
    """A database in a file, which belongs to one rendezvous at a time.

    Raises UsageError if the file cannot be such a database, if another rendezvous uses it, or if another version or another program has
    written it; `load` raises it, too, for a damaged file, and closes this.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._usable():
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=0)
            try:
                self._open()
            except BaseException:
                self._connection.close()
                raise

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Say which file cannot be used if something in this context finds that out."""
        cannot = f"cannot keep the rendezvous' state in {self._path}"
        try:
            yield
        except OSError as error:
            raise UsageError(f"{cannot}: {error.strerror}; choose another file") from error
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):  # the rest is detail
                raise UsageError(f"{cannot}: {error}; see that there is room on its disk, or choose another file") from error
            raise UsageError(
                f"{cannot}: {error}; another rendezvous may be using the file, or it is damaged or of another kind; choose another file"
            ) from error

    def _open(self) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # so that a second rendezvous gets an error at once
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("BEGIN EXCLUSIVE")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise UsageError(
                f"{self._path} was written by another version of shardnet (tables {version}, here {VERSION}); choose another file"
            )
        if version == 0 and self._connection.execute("SELECT name FROM sqlite_schema").fetchone() is not None:
            raise UsageError(f"{self._path} is a database of another program; choose another file")
        if version == 0:  # otherwise there is nothing to write, for which the disk may have no room
            for statement in _SCHEMA.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
        self._connection.execute("COMMIT")
        # A change costs no wait for the disk, but all changes survive the end of the process, and of the machine all but the last ones.
        (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode == "wal":  # a file system may not have what that needs: then a machine's end could damage the file
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def load(self) -> Sequence[SavedJob]:
        try:
            with self._usable():
                return self._load()
        except BaseException:
            self._connection.close()
            raise

    def _load(self) -> Sequence[SavedJob]:
        jobs = []
        for name, epoch, least, most, elastic, ended in self._connection.execute(
            "SELECT name, epoch, min_world_size, max_world_size, elastic, ended FROM jobs ORDER BY rowid"
        ).fetchall():
            rows = self._connection.execute(
                "SELECT rank, incarnation, address, node, local_rank_hint, identity, gone FROM members WHERE job = ? ORDER BY rank", (name,)
            )
            members: list[tuple[int, JoinRequest]] = []
            left: list[tuple[int, JoinRequest]] = []
            for rank, incarnation, address, node, hint, identity, gone in rows:
                try:
                    request = JoinRequest(name, incarnation, address, node, least, most, hint, elastic=bool(elastic), identity=identity)
                except (UsageError, TypeError) as error:
                    raise UsageError(f"{self._path} is damaged: rank {rank} of job {name!r}: {error}; choose another file") from error
                (left if gone else members).append((rank, request))
            jobs.append(SavedJob(name, epoch, least, most, bool(elastic), bool(ended), tuple(members), tuple(left)))
        return jobs

    def save(self, job: SavedJob) -> None:
        members = [
            (job.name, rank, each.incarnation, each.address, each.node, each.local_rank_hint, each.identity, int(gone))
            for group, gone in ((job.members, False), (job.gone, True))
            for rank, each in group
        ]

        def replace() -> None:
            self._connection.execute("DELETE FROM jobs WHERE name = ?", (job.name,))
            self._connection.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?)",
                (job.name, job.epoch, job.min_world_size, job.max_world_size, int(job.elastic), int(job.ended)),
            )
            self._connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", members)

        self._write(replace)

    def drop(self, name: str) -> None:
        self._write(lambda: self._connection.execute("DELETE FROM jobs WHERE name = ?", (name,)))

    def _write(self, change: Callable[[], object]) -> None:
        """Make a change in one transaction."""
        try:
            self._connection.execute("BEGIN")
            with self._connection:  # commits, or rolls back after an error
                change()
        except sqlite3.Error as error:
            log.error("cannot write to %s: %s; after a restart the rendezvous would not know of this change", self._path, error)

    def close(self) -> None:
        self._connection.close()
