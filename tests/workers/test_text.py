"""Reading, splitting and windowing the training text."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from text import HELD_OUT, TextError, Windows, find_files, read_text, split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(45):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([number]) * 100)
    return tmp_path


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=60))
def test_a_split_loses_no_byte_and_shares_none(contents: list[bytes]) -> None:
    train, valid = split(contents)
    assert sorted(train + valid) == sorted(b"".join(contents))


def test_many_files_are_held_out_whole(folder: Path) -> None:
    text = read_text(folder, context=10)
    held_out = set(text.valid.data.tolist())
    assert held_out == {10, 30}
    assert not held_out & set(text.train.data.tolist())
    assert text.files == 45


def test_of_few_files_the_tail_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(200)) * 20
    (tmp_path / "one").write_bytes(content)
    text = read_text(tmp_path / "one", context=16)
    cut = len(content) - len(content) // HELD_OUT
    assert bytes(text.train.data.tolist()) == content[:cut]
    assert bytes(text.valid.data.tolist()) == content[cut:]


@given(st.integers(0, 100), st.integers(1, 12))
def test_windows_predict_every_byte_once(size: int, context: int) -> None:
    windows = Windows(torch.arange(size, dtype=torch.uint8), context)
    if not len(windows):
        assert size <= context
        return
    inputs, targets = windows.batch(range(len(windows)))
    assert inputs.shape == targets.shape == (len(windows), context)
    assert torch.equal(targets, inputs + 1)
    predicted = targets.flatten().tolist()
    assert predicted == list(range(1, len(predicted) + 1))
    assert size - 1 - len(predicted) < context


def test_thinned_windows_are_spread_over_the_text() -> None:
    windows = Windows(torch.zeros(1001, dtype=torch.uint8), 10)
    assert len(windows) == 100
    assert windows.thinned(4) == [0, 25, 50, 75]
    assert windows.thinned(500) == list(range(100))


def test_the_standard_library_is_a_text_that_is_the_same_every_time() -> None:
    first, again = read_text(None, 256), read_text(None, 256)
    assert first.fingerprint == again.fingerprint
    assert len(first.train) > 10_000 > len(first.valid) > 500
    assert b"def main" in bytes(first.train.data.tolist())


def test_the_fingerprint_tells_texts_apart(folder: Path) -> None:
    before = read_text(folder, 10).fingerprint
    (folder / "03.txt").write_bytes(bytes([3]) * 99 + b"x")
    assert read_text(folder, 10).fingerprint != before


def test_hidden_and_empty_files_are_left_out(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "99.txt").touch()
    assert read_text(folder, 10).files == 45
    assert not any(".git" in path.parts for path in find_files(folder))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "no file or folder"), (b"", "holds no text"), (b"too short", "too short: 9 bytes"), (b"x" * 200, "too short")],
)
def test_unusable_text_is_refused_by_name(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "novel.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=complaint) as refusal:
        read_text(path, context=16)
    assert "novel.txt" in str(refusal.value)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no files in"):
        read_text(tmp_path, context=16)
