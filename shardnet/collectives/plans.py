"""Which algorithm a collective takes, on flat arrays of one rank.

Up to about `Limits.eager_bytes` a peer everything is a direct exchange: one step, one message a peer, or two steps for an
all-reduce that is too large to send to everyone whole. Above that, gathers and sums are direct, too, chunk by chunk, where
all ranks are on one node, and go around the ring otherwise; but there sums of 16-bit floats are exchanged at any size (see
[Note: reduction order]). The choice depends only on what all ranks know, so they choose alike.

[Note: no rank ends before all have entered] Whichever algorithm: what lets a rank end depends on every rank's
announcement. So no rank reports success for a collective that others refuse, and a rank that leaves after its last
collective takes nothing along that others still need.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardnet.collectives.direct import Direct
from shardnet.collectives.exchange import Exchange
from shardnet.collectives.group import Group
from shardnet.collectives.operation import Algorithm, Operation
from shardnet.collectives.reduction import Array, Reduction
from shardnet.collectives.ring import Bounds, Ring
from shardnet.collectives.two_shot import TwoShot


def balanced_bounds(elements: int, ranks: int) -> Bounds:
    """Cut elements over ranks: the first `elements % ranks` blocks are one longer."""
    size, longer = divmod(elements, ranks)
    starts = [rank * size + min(rank, longer) for rank in range(ranks + 1)]
    return list(pairwise(starts))


def bounds_of(sizes: Sequence[int]) -> Bounds:
    """Blocks of these numbers of elements, one behind the other."""
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def is_small(group: Group, bounds: Bounds, itemsize: int) -> bool:
    """Whether each block fits into an eager message."""
    return max(end - start for start, end in bounds) * itemsize <= group.board.limits.direct_bytes


def all_gather(group: Group, source: Array, output: Array, bounds: Bounds) -> Algorithm:
    """`source` is this rank's block; it may be that part of `output`, or overlap it."""
    own, small = output[slice(*bounds[group.rank])], is_small(group, bounds, output.itemsize)
    if group.on_one_node and not small and not np.may_share_memory(source, output):
        return Direct(bounds, output, gather=True, shard=source).run
    if own.ctypes.data != source.ctypes.data:
        np.copyto(own, source)
    if group.on_one_node and not small:
        return Direct(bounds, output, gather=True).run
    if small:
        receives = {peer: output[slice(*bounds[peer])] for peer in group.peers}
        return Exchange(dict.fromkeys(group.peers, own), receives, group.peers, eager=True).run
    return _around(Ring(bounds, output, gather=True))


def reduce_scatter(group: Group, source: Array, output: Array, bounds: Bounds, reduction: Reduction) -> Algorithm:
    """`output` is this rank's block of the reduced `source`."""
    small = is_small(group, bounds, source.itemsize)
    if group.on_one_node and not small:
        return Direct(bounds, output, gather=False, reduction=reduction, source=source).run
    if small or reduction.widens:
        own = source[slice(*bounds[group.rank])]
        sends = {peer: source[slice(*bounds[peer])] for peer in group.peers}
        return _reduce_direct(group, sends, own, output, reduction, eager=small)
    return _around(Ring(bounds, output, gather=False, reduction=reduction, source=source))


def all_reduce(group: Group, source: Array, output: Array, reduction: Reduction) -> Algorithm:
    """`output` may be `source` itself. Exchanged directly, a rank sends N / 2 times the bytes of a ring, but in one step."""
    if source.nbytes * group.size <= 2 * group.board.limits.direct_bytes:
        return _reduce_direct(group, dict.fromkeys(group.peers, source), source, output, reduction, eager=True)
    bounds = balanced_bounds(source.size, group.size)
    if is_small(group, bounds, source.itemsize):
        return TwoShot(bounds, source, output, reduction).run
    if group.on_one_node:
        return Direct(bounds, output, gather=True, reduction=reduction, source=source).run
    if reduction.widens:
        own = output[slice(*bounds[group.rank])]
        scatter = reduce_scatter(group, source, own, bounds, reduction)
        return _both(scatter, Ring(bounds, output, gather=True).run)
    return _around(Ring(bounds, output, gather=True, reduction=reduction, source=source))


def broadcast(group: Group, output: Array, root: int) -> Algorithm:
    """`output` holds the data on root and receives it elsewhere."""
    if output.nbytes <= group.board.limits.direct_bytes:
        if group.rank == root:
            return Exchange(dict.fromkeys(group.peers, output), {}, group.peers).run
        return Exchange({}, {root: output}, [root]).run
    bounds = bounds_of([output.size if rank == root else 0 for rank in range(group.size)])
    return Direct(bounds, output, gather=True).run if group.on_one_node else _around(Ring(bounds, output, gather=True))


def barrier(group: Group) -> Algorithm:
    return Exchange({}, {}, group.peers, eager=True).run


def _around(ring: Ring) -> Algorithm:
    """The ring, and before it what [Note: no rank ends before all have entered] asks for.

    A rank that has received something of every rank knows that all are there. Where a block is empty (in a broadcast
    all but one are) it would not, so then everyone announces to everyone; the ring itself does so between neighbours.
    """
    if all(end > start for start, end in ring.bounds):
        return ring.run

    async def run(op: Operation) -> None:
        peers = op.group.peers
        for peer in peers[:-1]:  # the last one is the left neighbour
            await op.announce(peer)
        for peer in peers[1:]:  # the first one is the right neighbour
            await op.cleared(peer)
        await ring.run(op)

    return run


def _both(first: Algorithm, second: Algorithm) -> Algorithm:
    """Two phases of one collective."""

    async def run(op: Operation) -> None:
        await first(op)
        await second(op)

    return run


def _reduce_direct(group: Group, sends: dict[int, Array], own: Array, output: Array, reduction: Reduction, *, eager: bool) -> Algorithm:
    """Exchange contributions, then add them up in rank order."""
    receives = {peer: np.empty_like(own) for peer in group.peers}

    async def run(op: Operation) -> None:
        await Exchange(sends, receives, group.peers, eager=eager).run(op)
        reduction.reduce([own if rank == group.rank else receives[rank] for rank in range(group.size)], output)

    return run
