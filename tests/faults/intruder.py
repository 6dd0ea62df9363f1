"""Another user of the machine, who looks for other users' memory; each function runs in a process of its own."""

import ctypes
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

NOBODY = 65534
KNOCK_S = 1.0  # how long to wait for a socket's answer
_PEEK_BYTES = 4096


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def as_nobody(*pids: str) -> int:
    """Look as a user without rights. The exit status says whether anything of these processes could be read."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return as_myself(*pids)


def as_myself(*pids: str) -> int:
    """Look as the user who runs this, who may read everything."""
    found = {name: what for pid in pids for name, what in _read(pid)}
    print(found)
    return len(found) > 0


def _read(pid: str) -> Iterator[tuple[str, int]]:
    """What this process could read, and how many bytes."""
    process = Path("/proc", pid)
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError), descriptor.open("rb") as file:
                if "memfd" in str(descriptor.readlink()):
                    yield f"{descriptor}", len(file.read(_PEEK_BYTES))
    addresses = list[int]()
    with suppress(OSError):
        lines = (process / "maps").read_text().splitlines()
        addresses = [int(line.partition("-")[0], 16) for line in lines if "memfd" in line or "[heap]" in line]
    for address in addresses:
        with suppress(OSError), (process / "mem").open("rb") as file:
            file.seek(address)
            yield f"{process}/mem {address:#x}", len(file.read(_PEEK_BYTES))
    for address in [*addresses, 0x400000]:
        if (count := _peek(int(pid), address)) > 0:
            yield f"process_vm_readv {pid} {address:#x}", count
    for path in Path("/dev/shm").iterdir():
        if "shardnet" in path.name and path.stat().st_uid != NOBODY:
            with suppress(OSError):
                path.unlink()
                yield f"unlinked {path}", 1
    yield from _knock()


def _peek(pid: int, address: int) -> int:
    buffer = ctypes.create_string_buffer(_PEEK_BYTES)
    here = _Range(ctypes.cast(buffer, ctypes.c_void_p), _PEEK_BYTES)
    there = _Range(ctypes.c_void_p(address), _PEEK_BYTES)
    return int(ctypes.CDLL(None, use_errno=True).process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def _knock() -> Iterator[tuple[str, int]]:
    """Sockets without a file (abstract ones), which any user can find: yield those that talk to a caller who asks for nothing."""
    names = {line.rpartition(" ")[2] for line in Path("/proc/net/unix").read_text().splitlines()}
    with ExitStack() as stack:
        doors: dict[socket.socket, str] = {}
        for name in names:
            if name.startswith("@shardnet-"):
                door = stack.enter_context(socket.socket(socket.AF_UNIX))
                door.setblocking(False)
                with suppress(OSError):
                    door.connect("\0" + name[1:])
                    doors[door] = name
        ends_s = time.monotonic() + KNOCK_S
        while doors and (left_s := ends_s - time.monotonic()) > 0:
            for door in select.select([*doors], [], [], left_s)[0]:
                with suppress(OSError):
                    if any(word in door.recv(_PEEK_BYTES) for word in (b"worker", b"rendezvous")):
                        yield doors[door], 1
                del doors[door]
