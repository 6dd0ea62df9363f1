"""`Segment`: memory that several ranks of a node write, and read as if it were their own."""

import mmap
import os

from shardnet.transport.shared_memory.mapping import forget, has_own_pages, mapped
from shardnet.transport.shared_memory.memfd import allocate, found

NAME = "shardnet-segment"


class Segment:
    """Made by one rank, opened by others; its memory goes with the last mapping of it.

    What is written to `shared` all ranks see. `private` shows the same, but what is written there only this rank sees, until
    `refresh`. Both stay mapped as long as somebody has them.
    """

    def __init__(self, size: int, owner: tuple[int, int, int] | None = None) -> None:
        """Without an owner it is allocated, else the one of that process with that descriptor and inode is mapped. Raises OSError."""
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
        # populated, or each page would cost a fault when it is used first
        self.shared, _ = mapped(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.private, self._address = mapped(descriptor, size, mmap.MAP_PRIVATE)

    def refresh(self) -> None:
        """Forget what was written to `private`."""
        if has_own_pages(self._address, len(self.private)):  # or all that is mapped would be mapped again, with a fault for each few pages
            forget(self._address, len(self.private))

    def close(self) -> None:
        """Nobody can open it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
