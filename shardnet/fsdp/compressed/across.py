"""`CompressedAcross`: one group's gradients, added up inside each node as they are, and averaged across nodes packed.

[Note: sums inside nodes] Ranks of a node that read each other's memory would only lose by packing. So a node adds up its
gradients first, in float32 and in rank order; each rank gets the sums that the ranks in its place (`NodeGrid`), one on each
node, need. It packs these with error feedback and exchanges them with those ranks (all_to_all); each receiver adds up in
the order of the nodes. With n ranks on a node, each rank packs, keeps residuals for and sends to other nodes 1/n of what it
would if it packed its own gradients, and a node's sum is rounded only once.

[Note: the packing thread] Packing begins when a node's sum is there, whatever the training thread is doing: that thread may be waiting for
a rank that waits for what must be packed. On the loop thread packing would hold up the transfers of other units. So a model has a thread
for packing.
"""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from shardnet.backend import Pending
from shardnet.fsdp.compressed.codec import Codec
from shardnet.fsdp.compressed.residual import Residual
from shardnet.fsdp.compressed.wire_memory import WireMemory
from shardnet.fsdp.node_grid import NodeGrid
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor


class Packer:
    """The thread on which the gradients of one model are packed and unpacked, see [Note: the packing thread]; lives as long as the model.

    They are packed in the order of `follow`, which is the same on all ranks, whatever the order in which sums come.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "shardnet-packer")
        self._coming: deque[Crossing] = deque()
        self._lock = threading.Lock()  # sums come on the loop thread, or at once on the caller's

    def follow(self, crossing: "Crossing") -> None:
        """Have it sent once its sum is there, or has failed, after those before it."""
        with self._lock:
            self._coming.append(crossing)
        crossing.summed.add_done_callback(lambda _: self._advance())

    def run(self, job: Callable[[], None]) -> None:
        """Run the job on the thread. If the interpreter ends, and the thread with it, run it here and now: whoever waits must hear of
        it."""
        try:
            self._thread.submit(job)
        except RuntimeError:
            job()

    def _advance(self) -> None:
        with self._lock:
            while self._coming and self._coming[0].summed.done():
                self.run(self._coming.popleft().send)


class CompressedAcross:
    """Any number of reductions of one group, see [Note: sums inside nodes]; lives as long as the group."""

    def __init__(self, codec: Codec, layout: FlatLayout, grid: NodeGrid, packer: Packer, residual: Residual, memory: WireMemory) -> None:
        self.codec = codec
        self.residual = residual
        self.packer = packer
        self._grid = grid
        self._memory = memory
        self._bounds = [layout.bounds(rank) for rank in range(layout.world_size)]
        self._ranks = layout.world_size
        self._sums = [sum(layout.sizes[rank] for rank in column) for column in grid.columns]  # elements, by place
        self._parts = [layout.sizes[rank] for rank in grid.columns[grid.inside.rank]]  # elements of this rank's sum, by node
        self._packed = [codec.size(numel) for numel in self._parts]

    def start(self, pieces: Sequence[Tensor], label: str) -> "Crossing":
        """Start the reduction of float32 `pieces`, of any shapes, which put end to end are the full gradients [N]."""
        self.residual.make_room(sum(self._parts))
        packed = self._memory.take(sum(self._packed), self.codec.wire_dtype)
        try:
            by_place = self._by_place([piece.view(-1) for piece in pieces])
            summed = self._grid.inside.reduce_scatter_pieces(by_place, sizes=self._sums, label=f"{label}, inside the node")
        except BaseException:
            self._memory.give(packed)
            raise
        crossing = Crossing(self, label, packed, summed.quietly())
        self.packer.follow(crossing)
        return crossing

    def _by_place(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """What the ranks in the first place need, node by node, then what those in the second place need, and so on: views [k] of the
        pieces [n]."""
        spans = list(pairwise(accumulate((len(piece) for piece in pieces), initial=0)))
        views = []
        for rank in (rank for column in self._grid.columns for rank in column):
            start, stop = self._bounds[rank]
            for piece, (first, last) in zip(pieces, spans, strict=True):
                if start < last and first < stop:
                    views.append(piece[max(start - first, 0) : stop - first])
        return views

    # --- on the packing thread

    def send(self, total: Tensor, packed: Tensor, label: str) -> Pending[Tensor]:
        """Pack the node's sum [sum of the parts], which is overwritten, and start sending it."""
        self.residual.pack(self.codec, total, self._parts, packed, self._packed)
        own = self._packed[self._grid.across.rank]
        received = [own] * self._grid.across.world_size
        return self._grid.across.all_to_all(packed, send_sizes=self._packed, recv_sizes=received, label=label)

    def refuse(self, label: str, error: BaseException) -> None:
        """The node's sum is missing: the other nodes, which may have theirs, must not wait."""
        self._grid.across.refuse(error, label=label)

    def mean(self, received: Tensor) -> Tensor:
        """The mean of what the nodes have sent, float32 [this rank's part]."""
        across = self._grid.across
        return self.codec.mean(received.view(across.world_size, self._packed[across.rank]), self._parts[across.rank], self._ranks)

    # --- on the training thread

    def free(self, packed: Tensor) -> None:
        self._memory.give(packed)


class Crossing:
    """One reduction on its way."""

    def __init__(self, reduction: CompressedAcross, label: str, packed: Tensor, summed: Pending[Tensor]) -> None:
        self._result: concurrent.futures.Future[Tensor] = concurrent.futures.Future()
        self.summed = summed
        self.mean = Pending(self._result, f"reduction of {label}")  # of this rank's part
        self._reduction = reduction
        self._label = label
        self._packed = packed

    @property
    def is_read(self) -> bool:
        """Whether nobody reads the full gradients any more."""
        return self.summed.done()

    def send(self) -> None:
        """Go on with the node's sum, which is there, or has failed; on the packing thread."""
        try:
            received = self._reduction.send(self.summed.wait(), self._packed, self._label)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to whoever waits for the mean
            self._reduction.refuse(self._label, error)
            self._result.set_exception(error)
        else:
            received.add_done_callback(lambda _: self._reduction.packer.run(lambda: self._receive(received)))

    def _receive(self, received: Pending[Tensor]) -> None:
        try:
            mean = self._reduction.mean(received.wait())
        except BaseException as error:  # noqa: BLE001 - as above
            self._result.set_exception(error)
        else:
            self._result.set_result(mean)

    def free(self) -> None:
        """Give the packed bytes back, once `mean` is done; on the training thread."""
        self._reduction.free(self._packed)
