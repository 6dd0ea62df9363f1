"""Which algorithm a collective uses, on flat arrays of one rank.

Small collectives are a direct exchange: one step and one message per peer, or two steps for an all-reduce that is too large to be sent
whole to everyone. Everything else goes chunk by chunk, directly inside a node and around a ring across nodes. The exception: where every
rank is a node, sums of 16-bit floats are exchanged directly at any size (see [Note: reduction order]), since on a ring they would be sent
widened. The choice depends only on what all ranks know, so all make the same one.

[Note: no rank ends before all have entered] Whatever the algorithm, the messages that let a rank end depend on every rank's
announcement. So no rank reports success for a collective that others refuse, and a rank that leaves after its last
collective takes nothing with it that others still need.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardnet.collectives.exchange import Exchange
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds, Hierarchical
from shardnet.collectives.operation import Algorithm, Operation
from shardnet.collectives.reduction import Array, Reduction, begin_together
from shardnet.collectives.two_shot import TwoShot


def balanced_bounds(elements: int, ranks: int) -> Bounds:
    """Cut elements over ranks: the first `elements % ranks` blocks are one longer."""
    size, longer = divmod(elements, ranks)
    starts = [rank * size + min(rank, longer) for rank in range(ranks + 1)]
    return list(pairwise(starts))


def bounds_of(sizes: Sequence[int]) -> Bounds:
    """Blocks of these numbers of elements, one after the other."""
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def small_bytes(group: Group) -> int:
    """The largest block that is sent directly. If several ranks share a node's link, the limit is lower, because each of them sends its
    block across once for every rank on the other nodes."""
    limits = group.board.limits
    return min(limits.direct_bytes, limits.inline_bytes) if group.route.is_hierarchical else limits.direct_bytes


def is_small(group: Group, bounds: Bounds, itemsize: int) -> bool:
    """Whether every block is small enough to be sent directly."""
    return max(end - start for start, end in bounds) * itemsize <= small_bytes(group)


def all_gather(group: Group, source: Array, output: Array, bounds: Bounds) -> Algorithm:
    """`source` is this rank's block; it may be its place in `output`, or overlap `output`."""
    own, small = output[slice(*bounds[group.rank])], is_small(group, bounds, output.itemsize)
    if not small and not np.may_share_memory(source, output):
        return Hierarchical(bounds, output, gather=True, shard=source).run
    if not begin_together(own, source):
        np.copyto(own, source)
    if small:
        receives = {peer: output[slice(*bounds[peer])] for peer in group.peers}
        return Exchange(dict.fromkeys(group.peers, own), receives, group.peers, eager=True).run
    return Hierarchical(bounds, output, gather=True).run


def fits_commons(group: Group, bounds: Bounds, itemsize: int) -> bool:
    """Whether a gather is large enough to go into one buffer per node."""
    return group.size > 1 and max(end - start for start, end in bounds) * itemsize > group.board.limits.inline_bytes


def all_gather_on_node(group: Group, source: Array, bounds: Bounds) -> Hierarchical:
    """`all_gather` into one buffer per node."""
    commons = group.commons if group.route.neighbours else None
    nowhere = np.empty(0 if commons else bounds[-1][1], source.dtype)
    return Hierarchical(bounds, nowhere, gather=True, shard=source, commons=commons)


def reduce_scatter(group: Group, source: Array, output: Array, bounds: Bounds, reduction: Reduction) -> Algorithm:
    """`output` is this rank's block of the reduced `source`; it may be that block of `source` itself, or overlap `source`."""
    source = apart(source, source[slice(*bounds[group.rank])], output)
    small = is_small(group, bounds, source.itemsize)
    if small or (reduction.widens and group.route.is_ring):
        own = source[slice(*bounds[group.rank])]
        sends = {peer: source[slice(*bounds[peer])] for peer in group.peers}
        return _reduce_direct(group, sends, own, output, reduction, eager=small)
    return Hierarchical(bounds, output, gather=False, reduction=reduction, source=source).run


def all_reduce(group: Group, source: Array, output: Array, reduction: Reduction) -> Algorithm:
    """`output` may be `source` itself, or overlap it. In a direct exchange a rank sends N / 2 times the bytes of a ring, in one step."""
    source = apart(source, source, output)
    if source.nbytes * group.size <= 2 * small_bytes(group):
        return _reduce_direct(group, dict.fromkeys(group.peers, source), source, output, reduction, eager=True)
    bounds = balanced_bounds(source.size, group.size)
    if is_small(group, bounds, source.itemsize):
        return TwoShot(bounds, source, output, reduction).run
    if reduction.widens and group.route.is_ring:
        own = output[slice(*bounds[group.rank])]
        scatter = reduce_scatter(group, source, own, bounds, reduction)
        return _both(scatter, Hierarchical(bounds, output, gather=True, eager=False).run)
    return Hierarchical(bounds, output, gather=True, reduction=reduction, source=source).run


def broadcast(group: Group, output: Array, root: int) -> Algorithm:
    """`output` holds the data on root and receives it elsewhere."""
    if output.nbytes <= small_bytes(group):
        if group.rank == root:
            return Exchange(dict.fromkeys(group.peers, output), {}, group.peers).run
        return Exchange({}, {root: output}, [root]).run
    bounds = bounds_of([output.size if rank == root else 0 for rank in range(group.size)])
    return Hierarchical(bounds, output, gather=True).run


def barrier(group: Group) -> Algorithm:
    return Exchange({}, {}, group.peers, eager=True).run


def apart(source: Array, place: Array, output: Array) -> Array:
    """`source`, or a copy of it if writing `output` would overwrite data yet to be sent. If `output` begins where `place` does, each result
    only overwrites its own element, and no copy is needed."""
    if not begin_together(output, place) and np.may_share_memory(source, output):
        return source.copy()
    return source


def _both(first: Algorithm, second: Algorithm) -> Algorithm:
    """Two phases of one collective."""

    async def run(op: Operation) -> None:
        await first(op)
        op.begin_next_phase()
        await second(op)

    return run


def _reduce_direct(group: Group, sends: dict[int, Array], own: Array, output: Array, reduction: Reduction, *, eager: bool) -> Algorithm:
    """Exchange contributions, then add them up in rank order."""
    receives = {peer: np.empty_like(own) for peer in group.peers}

    async def run(op: Operation) -> None:
        await Exchange(sends, receives, group.peers, eager=eager).run(op)
        reduction.reduce([own if rank == group.rank else receives[rank] for rank in range(group.size)], output)

    return run
