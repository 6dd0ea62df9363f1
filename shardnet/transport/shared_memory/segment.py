"""`Segment`: memory that several ranks of a node write and read as if it were their own."""

import mmap
import os

from shardnet.transport.shared_memory.mapping import forget, has_own_pages, mapped
from shardnet.transport.shared_memory.memfd import allocate, found

NAME = "shardnet-segment"


class Segment:
    """Made by one rank, opened by others; its memory is freed with its last mapping.

    All ranks see what is written to `shared`. `private` shows the same bytes, but only this rank sees what is written there, until
    `refresh` drops it (copy-on-write). Both stay mapped as long as somebody holds a reference to them.
    """

    def __init__(self, size: int, owner: tuple[int, int, int] | None = None) -> None:
        """Allocate the memory, or map the memory of an `owner`: its process, descriptor and inode. Raises OSError."""
        self.descriptor = -1
        self.inode = 0
        if owner is None:
            self.descriptor = allocate(NAME, size)
            try:
                self.inode = os.fstat(self.descriptor).st_ino
                self._map(self.descriptor, size)
            except BaseException:
                self.close()
                raise
        else:
            process, number, self.inode = owner
            with found(NAME, process, number, size, inode=self.inode, write=True) as descriptor:
                self._map(descriptor, size)

    def _map(self, descriptor: int, size: int) -> None:
        # populated: otherwise each page would cost a page fault at its first use
        self.shared, _ = mapped(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.private, self._address = mapped(descriptor, size, mmap.MAP_PRIVATE)

    def refresh(self) -> None:
        """Forget what was written to `private`."""
        if has_own_pages(self._address, len(self.private)):  # otherwise all of it would be mapped again, with a fault every few pages
            forget(self._address, len(self.private))

    def close(self) -> None:
        """Close the descriptor: nobody can open the segment any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
