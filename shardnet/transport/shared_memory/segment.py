"""`Segment`: memory that several ranks of a node write, and read as if it were their own."""

import ctypes
import mmap
import os
import weakref

import numpy as np

from shardnet.transport.shared_memory.memfd import allocate, found

NAME = "shardnet-segment"
_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """Made by one rank, opened by others; its memory goes with the last mapping of it.

    What is written to `shared` all ranks see. `private` shows the same, but what is written there only this rank sees, until
    `refresh`. Both stay mapped as long as somebody has them.
    """

    def __init__(self, size: int, owner: tuple[int, int] | None = None) -> None:
        """Without an owner it is allocated, else the one of that process with that descriptor is mapped. Raises OSError."""
        self.descriptor = -1
        if owner is None:
            self.descriptor = allocate(NAME, size)
            try:
                self._map(self.descriptor, size)
            except BaseException:
                self.close()
                raise
        else:
            with found(NAME, *owner, size, write=True) as descriptor:
                self._map(descriptor, size)

    def _map(self, descriptor: int, size: int) -> None:
        # populated, or each page would cost a fault when it is used first
        self.shared, _ = _mapped(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.private, self._address = _mapped(descriptor, size, mmap.MAP_PRIVATE)

    def refresh(self) -> None:
        """Forget what was written to `private`."""
        if _madvise(self._address, len(self.private), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Nobody can open it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _mapped(descriptor: int, size: int, flags: int) -> tuple[np.ndarray, int]:
    """The memory, unmapped with the last reference to it, and where it is. Unlike mmap's own this needs no descriptor meanwhile."""
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    owner = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(owner, _munmap, address, size).atexit = False
    return np.frombuffer(memoryview(owner).cast("B"), np.uint8), address


_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
