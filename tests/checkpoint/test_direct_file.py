"""Files that are written past the page cache hold what was written, on any file system."""

import errno
import fcntl
import os
import random
from pathlib import Path

import pytest

from shardnet.checkpoint import direct_file
from shardnet.checkpoint.direct_file import DirectFile

MIB = 2**20
needs_direct = pytest.mark.skipif(not direct_file._DIRECT, reason="this system has no files past its cache")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 4096])
def test_the_bytes_are_there_in_order(size: int, tmp_path: Path) -> None:
    data, rng = random.Random(size).randbytes(size), random.Random(1)
    rest = memoryview(data)
    with DirectFile(tmp_path / "file") as file:
        while rest:
            part = rest[: rng.choice([1, 100, 5000, 3 * MIB, 9 * MIB])]
            file.write(part)
            rest = rest[len(part) :]
    assert (tmp_path / "file").read_bytes() == data


def test_the_disk_has_it_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real_fsync = [], os.fsync

    def sync(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with DirectFile(tmp_path / "file") as file:
        file.write(bytes(5 * MIB + 3))
    assert synced == [(str(tmp_path / "file"), 5 * MIB + 3)]


def test_what_was_there_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with DirectFile(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@needs_direct
def test_the_cache_has_none_of_it(tmp_path: Path) -> None:
    """Nor would a file that was written as others are pass for one of these."""
    size = 2 * 4 * MIB
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no files past its cache")
    with DirectFile(tmp_path / "direct") as file:
        file.write(bytes(size))
    (tmp_path / "usual").write_bytes(bytes(size))
    if not _is_cached(tmp_path / "usual", size) or _lives_in_memory(tmp_path):
        pytest.skip("this file system is not one of a disk")
    assert not _is_cached(tmp_path / "direct", size)


def _is_cached(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], size // 2, os.RWF_NOWAIT) == 4096
        except BlockingIOError:
            return False


def _lives_in_memory(path: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(at), kind) for at, kind in mounts if path.is_relative_to(at))[1] == "tmpfs"


@needs_direct
@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_knows_only_its_cache(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse direct access when a file is opened, some when it is written to."""
    refusals = list[object]()
    real_open, real_write = os.open, os.write

    def opens(path: os.PathLike[str], flags: int, *mode: int) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            refusals.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    def writes(descriptor: int, data: memoryview) -> int:
        if refused == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refusals.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data[: MIB + 17])  # and not all at once

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "write", writes)
    data = random.Random(2).randbytes(9 * MIB + 5)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
    assert (tmp_path / "file").read_bytes() == data
    assert len(refusals) == 1


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/file"):
        DirectFile(tmp_path / "nowhere" / "file")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), DirectFile(full) as file:
        file.write(bytes(10))
