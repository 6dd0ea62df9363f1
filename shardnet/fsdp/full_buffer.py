"""`FullBuffer`: a flat tensor whose bytes come and go while the tensor stays.

[Note: one storage for life] Autograd saves views of the gathered parameters in forward and reads them in backward. In
between the bytes are freed. So the tensors stay the same all the time, and their storage is resized: to nothing when
the unit is done, and back when it is gathered again, so that what autograd saved finds its bytes. PyTorch's own FSDP2
does the same.

[Note: aliases] Bytes are written through an alias: another tensor over the same memory, with a version counter of its
own. Writing through the tensor itself would tell autograd that what it saved has changed. The alias also keeps numpy
away from the storage: `Tensor.numpy()` marks a storage as not resizable for ever.
"""

import torch

from shardnet.fsdp.memory import Gauge

Tensor = torch.Tensor


class FullBuffer:
    """The gathered parameters of one group, 1-D; see [Note: one storage for life].

    Made with memory, because views can only be taken while there is some: take them, then `free` it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, gauge: Gauge) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._gauge = gauge
        self._storage = self.tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._gauge.add(self._bytes)
        self.allocated = True

    def allocate(self) -> None:
        """Give the tensor memory of undefined content."""
        if not self.allocated:
            self._storage.resize_(self._bytes)
            self._gauge.add(self._bytes)
            self.allocated = True

    def free(self) -> None:
        """Take the memory away. Nobody may read the tensor or its views until it is allocated again."""
        if self.allocated:
            self._storage.resize_(0)
            self._gauge.remove(self._bytes)
            self.allocated = False

    def alias(self) -> Tensor:
        """A tensor [numel] to write through, valid until `free`. See [Note: aliases]."""
        assert self.allocated, "the buffer has no memory"
        aliased: Tensor = torch.from_dlpack(self.tensor)  # type: ignore[attr-defined]
        return aliased
