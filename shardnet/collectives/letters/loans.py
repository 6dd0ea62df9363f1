"""Each collective as a round that lends (see [Note: rounds that lend] in loan_round.py), on flat arrays of one rank.

Sums are taken in the same order as over streams within a node (plans.py, hierarchical.py), so both ways give the same bits.
"""

from collections.abc import Callable, Sequence

import numpy as np

from shardnet.collectives.commons import Release
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.letters.loan_round import Lending, LoanRound
from shardnet.collectives.letters.round import Course
from shardnet.collectives.parts import Part, Pieces, piecewise
from shardnet.collectives.plans import apart, balanced_bounds, is_small
from shardnet.collectives.reduction import Array, Reduction
from shardnet.collectives.route import Routing
from shardnet.pb.mesh_pb2 import Announcement

_COPY_BYTES = 4 * 1024 * 1024  # copied at once, before other rounds get their turn
_SOURCE, _OUTPUT = range(2)  # indices of the lots that a rank lends

# Makes the round's value of the gathered data and of the function that releases it, which is None if the data is this rank's alone.
Finish = Callable[[Array, Release | None], object]


def all_gather(group: Group, source: Array, output: Array, bounds: Bounds) -> Lending:
    """`source` is this rank's block; it may be its place in `output`, or overlap `output`."""
    blocks = _blocks(output, bounds)
    if np.may_share_memory(source, output):
        np.copyto(blocks[group.rank], source)
        source = blocks[group.rank]
    return Lending([[source]], *_gathered(group, bounds, source), lambda here: _gather(here, group, source, blocks))


def all_gather_on_node(group: Group, source: Array, bounds: Bounds, finish: Finish) -> Lending:
    """Gather into one buffer for all ranks, if there is memory for it. The round's value is what `finish` makes of it."""
    gather = _OnNode(group, source, bounds, finish)
    return Lending([[source]], *_gathered(group, bounds, source), gather.work, gather.note, gather.end)


class _OnNode:
    """One rank's part in a gather into one buffer: see [Note: one buffer a node]."""

    def __init__(self, group: Group, source: Array, bounds: Bounds, finish: Finish) -> None:
        self._group = group
        self._source = source
        self._bounds = bounds
        self._finish = finish
        self._commons = group.commons
        self._claim = self._commons.begin(bounds[-1][1] * source.itemsize)
        self.note = self._commons.note(self._claim).SerializeToString()

    def work(self, here: LoanRound) -> Course:
        if not self._commons.keeps:
            yield from self._hear_keeper(here)
        yield from self._fill(here) if self._claim.granted else self._copy_all(here)

    def end(self, error: BaseException | None) -> None:
        (self._commons.end if error is None else self._commons.fail)(self._claim)

    def _hear_keeper(self, here: LoanRound) -> Course:
        keeper = self._group.members.index(self._commons.keeper)
        yield from here.collect([keeper])
        try:
            self._commons.take(self._claim, Announcement.FromString(here.note(keeper)))
        except (OSError, ValueError) as error:
            here.check_letters()  # the keeper may have failed meanwhile, which is then the reason
            raise self._commons.unusable(self._group.board.where(), here.name, error) from error

    def _fill(self, here: LoanRound) -> Course:
        """Write this rank's block into the common buffer, and wait until the others have written theirs."""
        group, dtype = self._group, self._source.dtype
        yield from _write(self._source, self._claim.shared.view(dtype)[slice(*self._bounds[group.rank])])
        yield from self._hear_others(here)
        here.mark()
        yield from here.collect()
        yield from here.await_marks(group.peers)
        here.check_letters()
        mine, release = self._commons.lend(self._claim)
        here.value = self._finish(mine.view(dtype), release)

    def _hear_others(self, here: LoanRound) -> Course:
        """On the keeper, take the others' word of what they have released, before they can end the round."""
        if self._commons.keeps:
            yield from here.collect()
            for rank in self._group.peers:
                self._commons.hear(self._group.members[rank], Announcement.FromString(here.note(rank)))

    def _copy_all(self, here: LoanRound) -> Course:
        """Gather into memory of this rank's own, since there is none for a common buffer."""
        yield from self._hear_others(here)
        output = np.empty(self._bounds[-1][1], self._source.dtype)
        yield from _gather(here, self._group, self._source, _blocks(output, self._bounds))
        here.value = self._finish(output, None)


def reduce_scatter(group: Group, source: Array, output: Array, bounds: Bounds, reduction: Reduction) -> Lending:
    """`output` is this rank's block of the reduced `source`; it may be that block of `source` itself, or overlap `source`."""
    source = apart(source, source[slice(*bounds[group.rank])], output)
    return _reduce_scatter(group, [source], source[slice(*bounds[group.rank])], output, bounds, reduction)


def reduce_scatter_pieces(group: Group, pieces: Pieces, output: Array, bounds: Bounds, reduction: Reduction) -> Lending:
    """`reduce_scatter` of a source in pieces, which need not be cut the same way on all ranks. `output` is none of them."""
    return _reduce_scatter(group, pieces.arrays, pieces.cut(*bounds[group.rank]), output, bounds, reduction)


def _reduce_scatter(
    group: Group, lot: Sequence[Array], own: Array | Pieces, output: Array, bounds: Bounds, reduction: Reduction
) -> Lending:
    """`own` is this rank's block of its lent source."""

    def work(here: LoanRound) -> Course:
        yield from here.collect()
        yield from _reduce(here, group, own, bounds, reduction, output)
        yield from here.settle()

    sends = {rank: (bounds[rank][1] - bounds[rank][0]) * output.itemsize for rank in group.peers}
    return Lending([lot], sends, dict.fromkeys(group.peers, output.nbytes), work)


def all_reduce(group: Group, source: Array, output: Array, reduction: Reduction) -> Lending:
    """`output` may be `source` itself, or overlap it. Each rank adds up one block, and lends the sum."""
    source = apart(source, source, output)
    bounds = balanced_bounds(source.size, group.size)
    return _all_reduce(group, [source], source[slice(*bounds[group.rank])], output, bounds, reduction)


def all_reduce_pieces(group: Group, pieces: Pieces, output: Array, reduction: Reduction) -> Lending:
    """`all_reduce` of a source in pieces, which need not be cut the same way on all ranks. `output` is none of them."""
    bounds = balanced_bounds(len(pieces), group.size)
    return _all_reduce(group, pieces.arrays, pieces.cut(*bounds[group.rank]), output, bounds, reduction)


def _all_reduce(group: Group, lot: Sequence[Array], mine: Array | Pieces, output: Array, bounds: Bounds, reduction: Reduction) -> Lending:
    """`mine` is this rank's block of its lent source."""
    blocks = _blocks(output, bounds)
    own = blocks[group.rank]

    def work(here: LoanRound) -> Course:
        yield from here.collect()
        yield from _reduce(here, group, mine, bounds, reduction, own)
        here.mark()
        waiting = list(group.peers)
        while waiting:
            rank = next(filter(here.has_marked, waiting), None)
            if rank is None:
                yield waiting[0]
            else:
                waiting.remove(rank)
                yield from _copy(here, rank, _OUTPUT, bounds[rank][0], blocks[rank])
        yield from here.settle()

    moves = {rank: blocks[rank].nbytes + own.nbytes for rank in group.peers}
    return Lending([lot, [output]], moves, moves, work)


def broadcast(group: Group, output: Array, root: int) -> Lending:
    """`output` holds the data on root and receives it elsewhere."""

    def work(here: LoanRound) -> Course:
        yield from here.collect()
        if group.rank != root:
            yield from _copy(here, root, _SOURCE, 0, output)
        yield from here.settle()

    if group.rank == root:
        return Lending([[output]], dict.fromkeys(group.peers, output.nbytes), {}, work)
    return Lending([], {}, {root: output.nbytes}, work)


def all_to_all(group: Group, outgoing: Array, incoming: Array, block: int) -> Lending:
    """Send each rank its block of `outgoing`, of `block` elements."""
    mine = slice(group.rank * block, (group.rank + 1) * block)

    def work(here: LoanRound) -> Course:
        yield from _write(outgoing[mine], incoming[mine])
        yield from here.collect()
        for rank in group.peers:
            yield from _copy(here, rank, _SOURCE, group.rank * block, incoming[rank * block :][:block])
        yield from here.settle()

    moves = dict.fromkeys(group.peers, block * outgoing.itemsize)
    return Lending([[outgoing]], moves, moves, work)


def _blocks(whole: Array, bounds: Bounds) -> list[Array]:
    return [whole[start:end] for start, end in bounds]


def _gathered(group: Group, bounds: Bounds, source: Array) -> tuple[dict[int, int], dict[int, int]]:
    """How many bytes this rank sends to each other rank in a gather, and how many it gets from each."""
    sizes = {rank: (bounds[rank][1] - bounds[rank][0]) * source.itemsize for rank in group.peers}
    return dict.fromkeys(group.peers, source.nbytes), sizes


def _gather(here: LoanRound, group: Group, source: Array, blocks: list[Array]) -> Course:
    """Gather all blocks. `source` is this rank's own, which may already be in its place."""
    if source is not blocks[group.rank]:
        yield from _write(source, blocks[group.rank])
    yield from here.collect()
    for rank in group.peers:
        yield from _copy(here, rank, _SOURCE, 0, blocks[rank])
    yield from here.settle()


def _write(source: Array, target: Array) -> Course:
    """Copy this rank's own data."""
    step = _COPY_BYTES // target.itemsize
    for first in range(0, target.size, step):
        np.copyto(target[first : first + step], source[first : first + step])
        yield None


def _copy(here: LoanRound, rank: int, lot: int, start: int, target: Array) -> Course:
    """Fill `target` from another rank's lot, beginning at element `start` of the lot."""
    step = _COPY_BYTES // target.itemsize
    for first in range(0, target.size, step):
        part = target[first : first + step]
        here.lent(rank, lot, (start + first) * target.itemsize, part.nbytes).read(0, part)
        yield None


def _reduce(here: LoanRound, group: Group, own: Array | Pieces, bounds: Bounds, reduction: Reduction, output: Array) -> Course:
    """Reduce this rank's block over the sources of all ranks; `own` is this rank's part."""
    start, end = bounds[group.rank]
    if start == end:
        return
    offset, size = start * output.itemsize, (end - start) * output.itemsize
    in_rank_order = reduction.widens or group.board.routing is Routing.RANK_ORDER or is_small(group, bounds, output.itemsize)
    ranks = range(group.size) if in_rank_order else group.route.node
    parts: list[Part] = [own if rank == group.rank else here.lent(rank, _SOURCE, offset, size) for rank in ranks]
    for piece, arrays, _ in piecewise(parts, None, output, output.dtype):
        reduction.reduce_in_turn(arrays, output[piece])
        yield None
