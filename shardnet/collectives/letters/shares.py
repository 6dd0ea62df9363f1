"""Each collective as a round of letters (see [Note: rounds] in round.py), on flat arrays of one rank.

Every rank computes each sum itself, in rank order, like an exchange over streams does (see [Note: reduction order]).
"""

from collections.abc import Mapping

import numpy as np

from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.letters.letter_round import Share
from shardnet.collectives.plans import apart
from shardnet.collectives.reduction import Array, Reduction, as_bytes, copy_bytes
from shardnet.wire import Buffer


def all_gather(group: Group, source: Array, output: Array, bounds: Bounds) -> Share:
    """`source` is this rank's block; it may be its place in `output`, or overlap `output`."""
    np.copyto(output[slice(*bounds[group.rank])], source)

    def finish(theirs: Mapping[int, Buffer]) -> None:
        for rank, data in theirs.items():
            copy_bytes(data, output[slice(*bounds[rank])])

    return Share(as_bytes(output[slice(*bounds[group.rank])]), finish)


def reduce_scatter(group: Group, source: Array, output: Array, bounds: Bounds, reduction: Reduction) -> Share:
    """`output` is this rank's block of the reduced `source`; it may be that block of `source` itself, or overlap `source`."""
    block = slice(*bounds[group.rank])
    source = apart(source, source[block], output)

    def finish(theirs: Mapping[int, Buffer]) -> None:
        blocks = (source if rank == group.rank else reduction.view(theirs[rank]) for rank in range(group.size))
        reduction.reduce([each[block] for each in blocks], output)

    return Share(as_bytes(source), finish)


def all_reduce(group: Group, source: Array, output: Array, reduction: Reduction) -> Share:
    """`output` may be `source` itself, or overlap it."""
    source = apart(source, source, output)

    def finish(theirs: Mapping[int, Buffer]) -> None:
        reduction.reduce([source if rank == group.rank else reduction.view(theirs[rank]) for rank in range(group.size)], output)

    return Share(as_bytes(source), finish)


def broadcast(group: Group, output: Array, root: int) -> Share:
    """`output` holds the data on root and receives it elsewhere."""
    if group.rank == root:
        return Share(as_bytes(output), lambda _: None)
    return Share(b"", lambda theirs: copy_bytes(theirs[root], output))


def all_to_all(group: Group, outgoing: Array, incoming: Array, block: int) -> Share:
    """Send each rank its block of `outgoing`, of `block` elements."""
    mine = slice(group.rank * block, (group.rank + 1) * block)
    incoming[mine] = outgoing[mine]

    def finish(theirs: Mapping[int, Buffer]) -> None:
        for rank, data in theirs.items():
            np.copyto(incoming[rank * block :][:block], np.frombuffer(data, outgoing.dtype)[mine])

    return Share(as_bytes(outgoing), finish)


def barrier() -> Share:
    return Share(b"", lambda _: None)
