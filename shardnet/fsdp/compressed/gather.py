"""`CompressedGather`: one group's parameters, gathered packed.

[Note: where packing runs] Both ends run on the training thread: packing when a gather starts, unpacking when it is waited
for. On the loop thread, which finishes collectives, they would hold up the transfers of other units meanwhile.
"""

import torch

from shardnet.backend import Backend, Pending
from shardnet.fsdp.compressed.codec import Codec
from shardnet.fsdp.compressed.wire_memory import WireMemory
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor


class CompressedGather:
    """At most one gather at a time, from `start` to `finish` or `drop`; lives as long as the group.

    The owner of a shard takes its own values out of the packed bytes, too, so that all ranks compute with the same values.
    """

    def __init__(self, codec: Codec, layout: FlatLayout, gathers: Backend, memory: WireMemory) -> None:
        self._codec = codec
        self._layout = layout
        self._gathers = gathers
        self._memory = memory
        self._sizes = [codec.size(numel) for numel in layout.sizes]
        self._packed: Tensor | None = None  # [sum(sizes)]; owned by the collective until that is done

    def start(self, shard: Tensor, label: str) -> Pending[Tensor]:
        """Pack this rank's shard and start gathering; the shard may change meanwhile."""
        assert self._packed is None, label
        packed = self._packed = self._memory.take(sum(self._sizes), self._codec.wire_dtype)
        own = packed.split_with_sizes(self._sizes)[self._gathers.rank]
        self._codec.pack(shard, own)
        return self._gathers.all_gather(own, sizes=self._sizes, out=packed, label=f"{label} as {self._codec}")

    def finish(self, full: Tensor) -> None:
        """Unpack into `full` [N], unless that was done before. The gather must have succeeded."""
        if self._packed is None:
            return
        parts = self._packed.split_with_sizes(self._sizes)
        for part, out in zip(parts, full.split_with_sizes(list(self._layout.sizes)), strict=True):
            self._codec.unpack(part, out)
        self.drop()

    def drop(self) -> None:
        """Free the packed bytes, if there are any. No gather may be under way."""
        packed, self._packed = self._packed, None
        if packed is not None:
            self._memory.give(packed)

    def received(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """What a gather would bring of this rank's shard now, in the dtype of the full buffer."""
        return self._codec.received(shard, dtype)
