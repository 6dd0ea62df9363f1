"""`FullBuffer`: a flat tensor whose memory comes and goes while the tensor stays.

[Note: one storage for life] Autograd saves views of the gathered parameters in forward and reads them in backward. In
between their memory serves other units. So the tensors and their storage stay the same objects, and only the storage's
memory changes: it is taken away when the unit is done, and replaced when the unit is gathered again, so that the saved
views find their bytes. Reading a tensor whose storage has no memory raises. (Resizing the storage would work as well,
but reading a storage of size zero may crash the process.)

[Note: aliases] Bytes are written through an alias: another tensor over the same memory, with a version counter of its
own. Writing through the tensor itself would tell autograd that what it saved has changed.
"""

import torch

from shardnet.backend import NodeBuffer
from shardnet.fsdp.memory import Gauge
from shardnet.fsdp.pool import BufferPool

Tensor = torch.Tensor
# torch annotates neither how storages are made nor how they exchange their memory: each `type: ignore` below is one of these two.


class FullBuffer:
    """The gathered parameters of one group, 1-D; see [Note: one storage for life].

    Made with memory, because views can only be taken while there is some: take them, then `free` it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, owner: str, gauge: Gauge, pool: BufferPool) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.allocated = True
        self._gauge = gauge
        self._pool = pool
        self._storage = self.tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        # What the storage is exchanged with when it is freed or filled; holds no memory in between.
        self._vacant = torch.UntypedStorage(0, device=device)  # type: ignore[no-untyped-call]
        self._of_node: NodeBuffer | None = None  # the buffer that lends the memory, if this one does not use its own
        self._complaint = f"the full parameters of {owner} are freed: they can be read only while that unit runs forward or backward"
        _forbid_reading(self._vacant, self._complaint)
        self._counted = False
        self.expect()

    def allocate(self) -> None:
        """Give the tensor memory of undefined content."""
        if self.allocated or not self._bytes:
            return
        self._have(self._pool.take(self._bytes, self.tensor.device))

    def expect(self) -> None:
        """From now on count the memory that is being filled and that `adopt` will bring."""
        if not self._counted:
            self._gauge.add(self._bytes)
        self._counted = True

    def adopt(self, buffer: NodeBuffer) -> None:
        """In place of `allocate`: take memory that is already filled. `free` releases it."""
        if not self._bytes:
            buffer.release()
            return
        assert not self.allocated, self._complaint
        self._of_node = buffer
        self._have(buffer.tensor.untyped_storage())

    def _have(self, memory: torch.UntypedStorage) -> None:
        self._vacant = memory
        self._storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]
        self.expect()
        self.allocated = True

    def free(self, *, keep_memory: bool = True) -> None:
        """Take the memory away. Reading the tensor or its views raises until it is allocated again. With `keep_memory` other buffers
        of its kind may reuse the memory."""
        if self._counted:
            self._gauge.remove(self._bytes)
            self._counted = False
        if not self.allocated or not self._bytes:
            return
        self.allocated = False
        self._storage._swap_data_ptr_(self._vacant)  # type: ignore[attr-defined]
        _forbid_reading(self._storage, self._complaint)
        memory, self._vacant = self._vacant, torch.UntypedStorage(0, device=self.tensor.device)  # type: ignore[no-untyped-call]
        buffer, self._of_node = self._of_node, None
        if buffer is not None:
            buffer.release(keep=keep_memory)
        elif keep_memory:
            self._pool.give(memory)

    def alias(self) -> Tensor:
        """A tensor [numel] to write through, valid until `free`. See [Note: aliases]."""
        aliased: Tensor = torch.from_dlpack(self.tensor)  # type: ignore[attr-defined]
        return aliased


class WholeShard:
    """In place of a `FullBuffer` where one rank holds all of a group: the shard is the full buffer, and always there."""

    allocated = True

    def __init__(self, shard: Tensor) -> None:
        self.tensor = shard

    def free(self, *, keep_memory: bool = True) -> None:
        """Nothing to free: it is the shard's memory."""


def _forbid_reading(storage: torch.UntypedStorage, complaint: str) -> None:
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, complaint)
