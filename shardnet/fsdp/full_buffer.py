"""`FullBuffer`: a flat tensor whose memory comes and goes while the tensor stays.

[Note: one storage for life] Autograd saves views of the gathered parameters in forward and reads them in backward. In
between their memory serves other units. So the tensors and their storage stay the same objects, and only the storage's
memory changes: it is taken away when the unit is done, and replaced when the unit has been gathered again, so that the saved
views find their bytes. Until then reading them raises. For backward may read them too early: a loss that is computed in the unit,
and leaves it by another way than its outputs, has a graph whose hooks nobody has set. In memory that is only being filled it would
find any values. (Resizing the storage would work as well, but reading a storage of size zero may crash the process.)

[Note: aliases] Bytes are written through an alias: another tensor over the same memory, with a version counter of its
own. Writing through the tensor itself would tell autograd that what it saved has changed.

[Note: storage without memory] On the CPU it keeps its size, so that views of a tensor can be made, as backward does before it reads
them, and the reading raises our error. Otherwise making the view would raise one that names no unit.
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
        self._vacant = _without_memory(self._bytes, device)
        self._incoming: torch.UntypedStorage | None = None  # memory that is being filled
        self._of_node: NodeBuffer | None = None  # the buffer that lends the memory, if this one does not use its own
        self._complaint = (
            f"the full parameters of {owner} are freed: they can be read only while that unit runs forward or backward. If backward reads "
            "them, a tensor that the unit computed has reached the loss by another way than the unit's outputs (docs/scripts.md)"
        )
        _forbid_reading(self._vacant, self._complaint)
        self._counted = False
        self.expect()

    def allocate(self) -> None:
        """Take memory of undefined content, to be filled through `alias`. The tensor has it from `reveal` on."""
        if self.allocated or self._incoming is not None or not self._bytes:
            return
        self._incoming = self._pool.take(self._bytes, self.tensor.device)
        self.expect()

    def reveal(self) -> None:
        """Give the tensor the memory that has been filled, if it does not have it yet."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self._have(incoming)

    def expect(self) -> None:
        """From now on count the memory that is being filled and that `adopt` will bring."""
        if not self._counted:
            self._gauge.add(self._bytes)
        self._counted = True

    def adopt(self, buffer: NodeBuffer) -> None:
        """In place of `allocate` and `reveal`: take memory that is already filled. `free` releases it."""
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
        """Take the memory away. Reading the tensor or its views raises until it has memory again. With `keep_memory` other buffers
        of its kind may reuse the memory."""
        if self._counted:
            self._gauge.remove(self._bytes)
            self._counted = False
        memory, self._incoming = self._incoming, None
        if self.allocated and self._bytes:
            self.allocated = False
            self._storage._swap_data_ptr_(self._vacant)  # type: ignore[attr-defined]
            _forbid_reading(self._storage, self._complaint)
            memory, self._vacant = self._vacant, _without_memory(self._bytes, self.tensor.device)
        buffer, self._of_node = self._of_node, None
        if buffer is not None:
            buffer.release(keep=keep_memory)
        elif keep_memory and memory is not None:
            self._pool.give(memory)

    def alias(self) -> Tensor:
        """A tensor [numel] to write through, before and after `reveal`, valid until `free`. See [Note: aliases]."""
        tensor = self.tensor
        if self._incoming is not None:
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(self._incoming, 0, tensor.shape, (1,))
        aliased: Tensor = torch.from_dlpack(tensor)  # type: ignore[attr-defined]
        return aliased


class WholeShard:
    """In place of a `FullBuffer` where one rank holds all of a group: the shard is the full buffer, and always there."""

    allocated = True

    def __init__(self, shard: Tensor) -> None:
        self.tensor = shard

    def free(self, *, keep_memory: bool = True) -> None:
        """Nothing to free: it is the shard's memory."""


def _without_memory(count: int, device: torch.device) -> torch.UntypedStorage:
    """See [Note: storage without memory]."""
    if device.type == "cpu":
        made: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(0, device, count)  # type: ignore[assignment]  # wrongly annotated
        return made
    return torch.UntypedStorage(0, device=device)  # type: ignore[no-untyped-call]


def _forbid_reading(storage: torch.UntypedStorage, complaint: str) -> None:
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, complaint)
