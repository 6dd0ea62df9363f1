"""How data gets from node to node and back: the two halves of a collective of a `HybridBackend`. See [Note: stages of a hybrid]."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

import torch

from shardnet.backend.base import Tensor
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.backend.pending import Pending
from shardnet.backend.rails import Rails
from shardnet.backend.stage import Journey
from shardnet.backend.tensors import flat, in_bytes, put, raw
from shardnet.backend.torch_group import TorchGroup
from shardnet.backend.torch_sums import combined, finish, sum_dtype
from shardnet.collectives import plans
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.reduction import ReduceOp, Reduction

Order = Callable[[Reduction], list[int]]  # the order in which the parts of a node's members are added
_BEHIND_S = 1.0  # a rail gives up this much later than its collective, whose error says more


class Terms(TypedDict):
    """The keyword arguments of every call on a rail."""

    timeout_s: float
    label: str


def terms(journey: Journey) -> Terms:
    op = journey.operation
    assert op is not None
    return Terms(timeout_s=max(0.0, op.deadline - time.monotonic()) + _BEHIND_S, label=op.name)


@dataclass
class Scatter:
    """The sum of all ranks' parts: `begin` sums up inside the node and begins the sums along the rails, and `finish` puts this rank's
    block into `out`.

    `bounds` are the ranks' blocks of `source`, in elements; `out` is flat and may overlap it.
    """

    rails: Rails
    node: TorchGroup
    mesh: Callable[[int], MeshBackend]  # the mesh of a rail
    source: Tensor
    out: Tensor
    bounds: Bounds
    reduction: Reduction
    order: Order
    _along: dict[int, Pending[Tensor]] = field(default_factory=dict)  # by rail

    def begin(self, journey: Journey) -> list[Pending[Tensor]]:
        sums = {owner: total for node in range(len(self.rails.nodes)) for owner, total in self._sums_of(node)}
        op = ReduceOp.SUM if self.reduction.op is ReduceOp.MEAN else self.reduction.op
        nothing = self.source.new_empty(0, dtype=sum_dtype(self.reduction))
        for rail in self.rails.mine:
            owners = self.rails.owners(rail)
            whole = journey.keep(torch.cat([nothing if owner is None else sums[owner] for owner in owners]))
            self._along[rail] = self.mesh(rail).reduce_scatter(whole, op, sizes=_lengths(owners, self.bounds), **terms(journey))
        return list(self._along.values())

    def finish(self, journey: Journey) -> tuple[()]:
        for rail, pending in self._along.items():
            total = journey.take(pending)
            if rail == self.rails.member:
                finish(self.reduction, total, self.out)
        return ()

    def _sums_of(self, node: int) -> list[tuple[int, Tensor]]:
        """This node's sums of blocks owned by ranks of `node`, as (owner, sum): those whose rails this rank serves."""
        found = []
        for ranks in self.rails.layers(node):
            bounds = _padded([self.bounds[rank] for rank in ranks], len(self.rails.node))
            start, end = bounds[self.rails.member]
            parts = self.source.new_empty(len(bounds), end - start)
            places = plans.bounds_of([(end - start) * parts.itemsize] * len(bounds))
            self.node.exchange(raw(self.source), in_bytes(bounds, parts), raw(parts), places)
            if self.rails.member < len(ranks):
                found.append((ranks[self.rails.member], combined(self.reduction, [parts[each] for each in self.order(self.reduction)])))
        return found


@dataclass
class Gather:
    """All ranks' blocks, into `result`: `begin` gathers along the rails, then `finish` inside the node. `source` is this rank's block."""

    rails: Rails
    node: TorchGroup
    mesh: Callable[[int], MeshBackend]  # the mesh of a rail
    source: Tensor
    result: Tensor
    bounds: Bounds
    own: int  # this rank
    _along: dict[int, Pending[Tensor]] = field(default_factory=dict)  # by rail

    def begin(self, journey: Journey) -> list[Pending[Tensor]]:
        for rail in self.rails.mine:
            mine = flat(self.source) if rail == self.rails.member else self.source.new_empty(0)
            sizes = _lengths(self.rails.owners(rail), self.bounds)
            self._along[rail] = self.mesh(rail).all_gather(mine, sizes=sizes, **terms(journey))
        return list(self._along.values())

    def finish(self, journey: Journey) -> tuple[()]:
        put(self.source, self._block(self.own))
        for rail, pending in self._along.items():
            owners = self.rails.owners(rail)
            blocks = torch.split(journey.take(pending), _lengths(owners, self.bounds))
            for owner, block in zip(owners, blocks, strict=True):
                if owner is not None and owner != self.own:
                    self._block(owner).copy_(block)
        for node in range(len(self.rails.nodes)):
            for ranks in self.rails.layers(node):
                bounds = _padded([self.bounds[rank] for rank in ranks], len(self.rails.node))
                self.node.gather(raw(self.result), in_bytes(bounds, self.result))
        return ()

    def _block(self, rank: int) -> Tensor:
        return flat(self.result)[slice(*self.bounds[rank])]


def _lengths(owners: list[int | None], bounds: Bounds) -> list[int]:
    """The number of elements in the blocks of these ranks; 0 where there is no rank."""
    return [0 if owner is None else bounds[owner][1] - bounds[owner][0] for owner in owners]


def _padded(bounds: Bounds, count: int) -> Bounds:
    """The bounds, filled up to `count` with empty ones after the last."""
    return [*bounds, *[(bounds[-1][1], bounds[-1][1])] * (count - len(bounds))]
