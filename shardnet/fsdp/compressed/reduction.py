"""`CompressedReduction`: one group's gradients, sent packed to all ranks of the group, with error feedback.

Every rank cuts its full gradients into one part for each rank, packs them, and sends each part to its rank (all_to_all). The
receiver unpacks the parts one after the other in rank order and adds them up in float32: the same bits each time. The sender keeps
what packing rounded off and adds it to its next gradients ([Note: error feedback] in residual.py). Both ends run on the training
thread, see [Note: where packing runs]. Where nodes hold several ranks there is a better way, across.py.
"""

import concurrent.futures
from functools import partial

import torch

from shardnet.backend import Pending
from shardnet.backend.streams import is_on_gpu, join, now
from shardnet.errors import ShardnetError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compressed.codec import Codec
from shardnet.fsdp.compressed.residual import Residual
from shardnet.fsdp.compressed.wire_memory import WireMemory
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor


class CompressedReduction:
    """Any number of reductions of one group, one after the other; lives as long as the group."""

    def __init__(self, codec: Codec, layout: FlatLayout, comms: Communicators, residual: Residual, memory: WireMemory) -> None:
        self.codec = codec
        self.residual = residual
        self._layout = layout
        self._comms = comms
        self._ranks = comms.reductions
        self._memory = memory
        self._sizes = [codec.size(numel) for numel in layout.sizes]

    def start(self, full: Tensor, label: str) -> "Exchange":
        """Pack float32 `full` [N], which is overwritten and free again when this returns, and start sending."""
        packed = self._memory.take(sum(self._sizes), self.codec.wire_dtype)
        try:
            self.residual.make_room(len(full))
            self.residual.pack(self.codec, full, self._layout.sizes, packed, self._sizes)
            own = self._sizes[self._ranks.rank]
            received = self._ranks.all_to_all(packed, send_sizes=self._sizes, recv_sizes=[own] * self._ranks.world_size, label=label)
        except BaseException:
            self._memory.give(packed)
            raise
        return Exchange(self, label, packed, received)

    def finish(self, label: str, packed: Tensor, received: Pending[Tensor]) -> Tensor:
        """Wait for what the ranks sent, and return the mean, float32 [this rank's part]. `packed` is given back, also after an error."""
        try:
            parts = self._comms.wait(received, f"reduce {label}")
        except ShardnetError:
            self._memory.give(packed)
            raise
        self._memory.give(packed)
        rank, ranks = self._ranks.rank, self._ranks.world_size
        return self.codec.mean(parts.view(ranks, self._sizes[rank]), self._layout.sizes[rank], ranks)


class Exchange:
    """One reduction on its way: `finish` ends it, on the training thread, and then `mean` is done."""

    def __init__(self, reduction: CompressedReduction, label: str, packed: Tensor, received: Pending[Tensor]) -> None:
        self._result: concurrent.futures.Future[Tensor] = concurrent.futures.Future()
        self.mean = Pending(self._result, f"reduction of {label}")  # of this rank's part
        self._reduction = reduction
        self._label = label
        self._packed = packed  # owned by the collective until that is done
        self._received = received

    @property
    def arrived(self) -> bool:
        """Whether `finish` would not block."""
        return self._received.done()

    def finish(self) -> None:
        """Wait for what comes, unpack it, and give `mean` its result or error. Once is enough; again does nothing."""
        if self._result.done():
            return
        try:
            mean = self._reduction.finish(self._label, self._packed, self._received)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the mean. Not Ctrl-C: then bytes still move
            self._result.set_exception(error)
        else:
            if is_on_gpu(mean):
                self.mean.arrives(partial(join, now(mean.device), mean.device))  # whoever uses it may do so on another stream
            self._result.set_result(mean)
