"""Mapping memory for longer than its descriptor is open, and dropping private pages so that the file shows again (mmap(2), madvise(2))."""

import ctypes
import mmap
import os
import weakref

import numpy as np

_PRESENT_OR_SWAPPED, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)  # of an entry of /proc/self/pagemap
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapped(descriptor: int, size: int, flags: int, *, write: bool = True) -> tuple[np.ndarray, int]:
    """The memory, unmapped with the last reference to it, and its address. Unlike mmap.mmap this keeps no descriptor open meanwhile.

    Without `write` the memory is read-only. Raises OSError.
    """
    address = _mmap(None, size, mmap.PROT_READ | (mmap.PROT_WRITE if write else 0), flags, descriptor, 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    owner = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(owner, _munmap, address, size).atexit = False
    array = np.frombuffer(memoryview(owner).cast("B"), np.uint8)
    array.flags.writeable = write
    return array, address


def has_own_pages(address: int, size: int) -> bool:
    """Whether anything was written to a private mapping since it was made, or last forgotten. Also true if the system does not say."""
    start, end = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    try:
        entries = np.frombuffer(_page_map(start, end), np.uint64)
    except OSError:
        return True
    there = entries[entries & _PRESENT_OR_SWAPPED != 0]
    # If no page is reported present, the system says nothing about them, and perhaps never does about any.
    return len(entries) < end - start or not there.size or bool((there & _OF_FILE == 0).any())


def _page_map(start: int, end: int) -> bytes:
    """One entry of 64 bits for each of these pages (Documentation/admin-guide/mm/pagemap.rst)."""
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, 8 * (end - start), 8 * start)
    finally:
        os.close(descriptor)


def forget(address: int, size: int) -> None:
    """Drop what was written to a private mapping: its pages are read from their file again. Raises OSError."""
    if _madvise(address, size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
