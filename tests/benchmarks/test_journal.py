"""`Journal`: one process writes it while another one reads it."""

from pathlib import Path

from benchmarks.journal import Journal
from tests.benchmarks.rows import row


def test_the_reader_sees_rows_and_the_last_progress(tmp_path: Path) -> None:
    writer, reader = Journal(tmp_path / "journal"), Journal(tmp_path / "journal")
    assert reader.rows() == []
    assert reader.last_progress().total_steps == 0
    writer.progress(1, 3, "2 ranks")
    writer.add(row())
    writer.progress(2, 3, "2 ranks")
    assert reader.rows() == [row()]
    progress = reader.last_progress()
    assert (progress.step, progress.total_steps, progress.note) == (2, 3, "2 ranks")


def test_half_a_line_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add(row())
    with path.open("a") as file:
        file.write('{"progress": [1, ')
    assert journal.rows() == [row()]
    assert journal.last_progress().step == 0
