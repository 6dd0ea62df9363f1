"""Training text: bytes of files, cut into windows, a part held out for validation.

By default it is the source code of Python's own standard library, which every machine that runs this has.
"""

import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 20  # every 20th file is held out, or the last 20th of the text
_SKIPPED = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib2to3", "encodings", "pydoc_data"})
_MAX_FILE_BYTES = 64 * 2**20  # a file larger than this is most likely no text


class TextError(Exception):
    """The text cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text as overlapping windows: window i has bytes i·context … i·context + context, both ends included.

    The last byte of a window is the first of the next, so every byte but the first is predicted exactly once. A tail
    that is too short for a window is left out.
    """

    data: Tensor  # uint8, 1-D
    context: int

    def __len__(self) -> int:
        return max(0, (len(self.data) - 1) // self.context)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each B×context int64; targets are the inputs shifted by one byte."""
        starts = torch.tensor(indices) * self.context
        windows = self.data[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def thinned(self, count: int) -> list[int]:
        """`count` window numbers, spread evenly (all of them if there are fewer)."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]


@dataclass(frozen=True, slots=True)
class Text:
    """Text to train on and text to validate on; they share no byte."""

    train: Windows
    valid: Windows
    files: int
    fingerprint: int  # crc32 of all bytes: ranks with different fingerprints have read different texts

    @property
    def size_bytes(self) -> int:
        return len(self.train.data) + len(self.valid.data)


def read_text(source: Path | None, context: int) -> Text:
    """The text of a file or a folder, or of the standard library (None). Raises TextError if it cannot be used."""
    contents = [content for path in find_files(source) if (content := _read(path))]
    name = source or "the standard library"
    if not contents:
        raise TextError(f"{name} holds no text: all files are empty")
    train, valid = split(contents)
    text = Text(Windows(_tensor(train), context), Windows(_tensor(valid), context), len(contents), _crc(contents))
    if not len(text.train) or not len(text.valid):
        raise TextError(f"{name} is too short: {text.size_bytes} bytes, but {HELD_OUT} windows of {context} + 1 bytes are needed")
    return text


def find_files(source: Path | None) -> list[Path]:
    """The files of a text, in an order that depends only on their names."""
    if source is None:
        return _standard_library()
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise TextError(f"there is no file or folder {source}")
    hidden_or_not = (path for path in source.rglob("*") if path.is_file())
    files = sorted(path for path in hidden_or_not if not any(part.startswith(".") for part in path.relative_to(source).parts))
    if not files:
        raise TextError(f"there are no files in {source}")
    return files


def split(contents: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Training and validation bytes: every 20th file is held out, or the last 20th of the text if there are fewer than 20 files."""
    if len(contents) >= HELD_OUT:
        held_out = range(HELD_OUT // 2, len(contents), HELD_OUT)
        train = b"".join(content for i, content in enumerate(contents) if i not in held_out)
        return train, b"".join(contents[i] for i in held_out)
    whole = b"".join(contents)
    cut = len(whole) - len(whole) // HELD_OUT
    return whole[:cut], whole[cut:]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts))
    found = sorted(files)
    if not found:
        raise TextError(f"this Python has no sources in {root}: give a file or folder with --text")
    return found


def _read(path: Path) -> bytes:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise TextError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB: split it, or leave it out")
    return path.read_bytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _crc(contents: Sequence[bytes]) -> int:
    crc = 0
    for content in contents:
        crc = zlib.crc32(content, crc)
    return crc
