"""How cost grows with ranks, size, collectives under way at once and depth of the model: one varies, the others stay as small as can be."""

from collections.abc import Iterable, Iterator

from benchmarks.plan import Case, Collectives, Op, Session, Topology, Training, Transport, default_repeats
from shardnet.config import KIB, MIB

KIND = "growth"  # of its rows
RANKS = (2, 4, 8, 16)
RANK_SIZES = (KIB, 16 * MIB)
SIZES = tuple(KIB * 4**power for power in range(9))
OUTSTANDING = (1, 2, 4, 8, 16, 32)
OUTSTANDING_SIZES = (64 * KIB, 4 * MIB)
LAYERS = (2, 4, 8, 16)
_MEASURED = [(size, 1) for size in OUTSTANDING_SIZES if size in SIZES]  # one at a time: measured among the sizes
PLACE = (Topology.ONE_NODE, Transport.SHM)


def sessions(chunk_bytes: int) -> Iterator[Session]:
    """Everything goes through shared memory on one machine, which may have far fewer cores than ranks."""
    for ranks in RANKS:
        yield _collectives(ranks, chunk_bytes, (_case(op, size) for op in (Op.ALL_GATHER, Op.ALL_REDUCE) for size in RANK_SIZES))
    yield _collectives(2, chunk_bytes, (_case(Op.ALL_REDUCE, size) for size in SIZES if size not in RANK_SIZES))
    at_once = (_case(Op.ALL_REDUCE, size, count) for size in OUTSTANDING_SIZES for count in OUTSTANDING if (size, count) not in _MEASURED)
    yield _collectives(2, chunk_bytes, at_once)
    for layers in LAYERS:
        yield Training(2, *PLACE, chunk_bytes, steps=10, dim=256, layers=layers, heads=8, context=128, bigrams=64, batch=2, kind=KIND)


def _collectives(ranks: int, chunk_bytes: int, cases: Iterable[Case]) -> Collectives:
    return Collectives(ranks, *PLACE, chunk_bytes, tuple(cases), kind=KIND)


def _case(op: Op, size: int, outstanding: int = 1) -> Case:
    return Case(op, size, default_repeats(size * outstanding), outstanding)
