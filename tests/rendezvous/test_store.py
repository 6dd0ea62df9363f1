"""What a rendezvous saves and reads back."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shardnet.errors import UsageError
from shardnet.rendezvous.store import SavedJob, SqliteStore
from tests.rendezvous.builders import elastic


def saved(name: str = "job", *, epoch: int = 3, numbers: tuple[int, ...] = (0, 2)) -> SavedJob:
    members = tuple((rank, elastic(number)) for rank, number in enumerate(numbers))
    return SavedJob(name, epoch, 2, 4, True, False, members, gone=((7, elastic(9)),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rendezvous.db"


def test_what_is_saved_is_there_for_the_next_one(path: Path) -> None:
    store = SqliteStore(path)
    assert list(store.load()) == []
    store.save(saved())
    store.save(saved("other", numbers=()))
    store.save(saved(epoch=4, numbers=(5,)))
    store.save(saved("third"))
    store.drop("third")
    store.close()
    again = SqliteStore(path)
    found = {job.name: job for job in again.load()}
    again.close()
    assert found.keys() == {"job", "other"}
    assert (found["job"].epoch, found["other"].members) == (4, ())
    (member,) = found["job"].members
    assert (member[0], member[1].incarnation, member[1].address) == (0, "w5", "10.0.0.1:7005")
    assert found["job"].gone == ((7, elastic(9)),)
    assert path.stat().st_mode & 0o077 == 0, "others could read it"


def test_a_change_does_not_wait_for_the_disk(path: Path) -> None:
    """Each worker that joins again is one, and the loop waits for it: with 128 workers that took two seconds."""
    store = SqliteStore(path)
    ((mode,), (synchronous,)) = (store._connection.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous"))
    assert (mode, synchronous) == ("wal", 1)  # NORMAL: only moving the log into the file waits
    store.close()


def test_a_file_belongs_to_one_at_a_time(path: Path) -> None:
    first = SqliteStore(path)
    with pytest.raises(UsageError, match="database is locked; another rendezvous may be using the file"):
        SqliteStore(path)
    first.save(saved())
    first.close()
    second = SqliteStore(path)
    assert [job.name for job in second.load()] == ["job"]
    second.close()


def test_a_full_disk_is_told_as_such_and_keeps_nobody_from_going_on(path: Path, tmp_path: Path) -> None:
    """Here no file can grow. A state that is there is only read at the start; what cannot be written later is logged."""
    store = SqliteStore(path)
    store.save(saved())
    store.close()
    program = f"""
import resource
from pathlib import Path
from shardnet.errors import UsageError
from shardnet.rendezvous.store import SqliteStore
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
store = SqliteStore(Path({str(path)!r}))
print([job.name for job in store.load()])
store.close()
try:
    SqliteStore(Path({str(tmp_path / "new.db")!r}))
except UsageError as error:
    print(error)
"""
    lines = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0] == "['job']"
    assert "see that there is room on its disk, or choose another file" in lines[1]


def test_what_is_no_state_of_a_rendezvous_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text("no database, but a text that is long enough to be taken for one\n" * 20)
    with pytest.raises(UsageError, match="file is not a database"):
        SqliteStore(path)
    with pytest.raises(UsageError, match="No such file or directory; choose another file"):
        SqliteStore(tmp_path / "nowhere" / "rendezvous.db")
    newer = tmp_path / "newer.db"
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(UsageError, match="written by another version of shardnet"):
        SqliteStore(newer)


def test_a_database_of_another_program_is_left_as_it_is(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE jobs (title TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"{path} is a database of another program; choose another file"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_and_named(path: Path) -> None:
    """It can be opened: only who reads the jobs notices."""
    store = SqliteStore(path)
    store.save(saved())
    store.close()
    connection = sqlite3.connect(path)
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'jobs'").fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * 100)
    with pytest.raises(UsageError, match=f"cannot keep the rendezvous' state in {path}: database disk image is malformed"):
        SqliteStore(path).load()


def test_a_member_that_makes_no_sense_is_refused_and_named(path: Path) -> None:
    store = SqliteStore(path)
    store.save(saved())
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE members SET address = 'nowhere' WHERE rank = 1")
    connection.commit()
    connection.close()
    with pytest.raises(UsageError, match=f"{path} is damaged: rank 1 of job 'job': 'nowhere' does not end in a port"):
        SqliteStore(path).load()


def test_what_cannot_be_written_whole_is_not_there_at_all_and_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The jobs go on, and an error says so: a full disk must not leave half a member in a rendezvous' memory."""
    store = SqliteStore(path)
    store.save(saved())
    store.save(SavedJob("job", 9, 2, 4, True, False, ((0, elastic(7)), (0, elastic(8)))))  # two of one rank
    assert [job.epoch for job in store.load()] == [3]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"cannot write to {path}: UNIQUE constraint failed")
    store.save(saved(epoch=5))
    assert [job.epoch for job in store.load()] == [5]
    store.close()
    store.save(saved(epoch=6))  # a rendezvous that closes while members leave
    assert len(caplog.records) == 2
