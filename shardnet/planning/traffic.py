"""The collectives of one step, and how long the links need for them.

[Note: load of a link] In a lap over N ranks, to gather or to reduce, each rank sends (N - 1) / N of the buffer; an all-reduce is two
laps. Each of M nodes must send (M - 1) / M of the buffer to the others, and sends no more, however many ranks it has
(shardnet/collectives/hierarchical.py). In HYBRID_SHARD each of a node's n ranks has its own ring across nodes, and the node's link
carries all of these rings. Sums of 16-bit floats cross nodes of several ranks as float32; where every rank is a node they are
exchanged as they are. Compressed gradients are sent directly (all_to_all): nodes of several ranks add them up first
([Note: sums inside nodes]), and send M - 1 of M parts of the sum; where a GPU computes they do not add up, and each of a node's n
ranks sends 1 / N of the buffer to every rank outside the node. Neighbours that gather secondary shards are consecutive ranks, which
may be on several nodes: in each lap that passes a node, the node sends the next one everything except what the next one holds itself.

[Note: whole gradients] Where no GPU computes, ranks of one node that read each other's memory give each other up to
`Limits.letter_bytes` of a unit's gradients whole, and each adds up its part itself (shardnet/collectives/letters/shares.py). So
among N ranks each sends N times as much to reduce, and N / 2 times as much to all-reduce. That is not in the plan, which knows
neither the devices nor the limits; `sends_whole` says whether a plan has such gradients.

Times are those of the busiest link at the given speed, without latency, packing, and what compute hides or delays.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardnet.config import Limits
from shardnet.planning.model import GroupSize, ModelSize
from shardnet.planning.setting import Setting, Strategy, packed_bytes

WHOLE_BYTES = min(Limits().letter_bytes, Limits().direct_bytes)  # the most of a unit that is sent whole: see [Note: whole gradients]
_SUM_BYTES = 4  # per element, of an unfinished sum of 16-bit floats


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind and purpose in one step, with what one rank sends."""

    op: str  # all_gather, reduce_scatter, all_to_all, all_reduce
    purpose: str
    count: int
    bytes_sent: int  # by one rank
    seconds: float | None  # None: the links' speed was not given


def plan_traffic(model: ModelSize, strategy: Strategy, setting: Setting) -> tuple[Traffic, ...]:
    """What one optimizer step with one backward sends; nothing in a world of one."""
    groups = [group for unit in model.units for group in unit.groups]
    trained = [group for group in groups if group.trainable]
    shards, replicas = setting.shards(strategy), setting.world_size // setting.shards(strategy)
    match strategy:
        case Strategy.NO_SHARD:
            planned = [_reductions("all_reduce", "average gradients", trained, setting)]
        case Strategy.ZERO_1:
            planned = [
                _reductions("reduce_scatter", "average gradients", trained, setting),
                _gathers("gather stepped parameters", trained, setting.world_size, setting, cast=False),
            ]
        case _:
            planned = [_gathers("gather for forward", groups, shards, setting)]
            again = [group for index in setting.gathered_twice(model, strategy) for group in model.units[index].groups]
            if (neighbours := setting.resharding(strategy).neighbours) is None:
                planned.append(_gathers("gather for backward", again, shards, setting))
            else:
                planned.append(_gathers_from_neighbours(again, neighbours, setting))
            packed = [group for group in trained if setting.gradient_codec(group) is not None]
            plain = [group for group in trained if setting.gradient_codec(group) is None]
            if setting.sums_on_nodes(strategy):
                planned.append(_sums_on_nodes(packed, setting))
            planned.append(_exchanges(packed, strategy, setting))
            planned.append(_reductions("reduce_scatter", "reduce gradients", plain, setting, ranks=shards))
            if strategy is Strategy.HYBRID_SHARD:
                planned.append(_averages(trained, shards, replicas, setting))
    return tuple(traffic for traffic in planned if traffic.bytes_sent)


def sends_whole(model: ModelSize, strategy: Strategy, setting: Setting) -> bool:
    """Whether a node's ranks send each other some gradients whole, if no GPU computes: see [Note: whole gradients]."""
    ranks = setting.shards(strategy) if strategy.sends_shards else setting.world_size
    fewest = 3 if strategy is Strategy.NO_SHARD else 2  # two ranks all-reduce in a lap what they would send whole

    def is_whole(group: GroupSize) -> bool:
        packed = setting.gradient_codec(group) is not None
        if packed and not setting.sums_on_nodes(strategy):
            return False  # they are exchanged
        reducing = setting.ranks_per_node if packed else ranks
        return fewest <= reducing <= setting.ranks_per_node and group.numel * setting.reduce(group).itemsize <= WHOLE_BYTES

    groups = [group for unit in model.units for group in unit.groups if group.trainable]
    return not setting.cpu_offload and any(map(is_whole, groups))


@dataclass(frozen=True, slots=True)
class _Load:
    """Bytes that a rank sends, those of them inside its node, and those that a node's link carries; see [Note: load of a link]."""

    sent: float = 0.0  # by one rank, to anywhere
    inside: float = 0.0  # of these, to ranks of its node
    leaving: float = 0.0  # what leaves the node, of all its ranks together

    def __add__(self, other: "_Load") -> "_Load":
        return _Load(self.sent + other.sent, self.inside + other.inside, self.leaving + other.leaving)


def _lap(size: float, ranks: int, setting: Setting, *, widened: int = 1) -> _Load:
    """The load to gather or reduce a buffer; `widened`: the factor by which a sum has more bytes on its way between nodes."""
    node = min(ranks, setting.ranks_per_node)
    nodes = ranks // node
    inside, leaving = size * (node - 1) / node, size * (nodes - 1) / nodes * (widened if node > 1 else 1)
    return _Load(inside + leaving / node, inside, leaving)


def _gathers(purpose: str, groups: Iterable[GroupSize], ranks: int, setting: Setting, *, cast: bool = True) -> Traffic:
    def size(group: GroupSize) -> int:
        if cast and (codec := setting.weight_codec(group)) is not None:
            return packed_bytes(codec, group, ranks)
        return group.numel * (setting.compute(group) if cast else group.dtype).itemsize

    return _traffic("all_gather", purpose, [_lap(size(group), ranks, setting) for group in groups], setting)


def _gathers_from_neighbours(groups: Iterable[GroupSize], neighbours: int, setting: Setting) -> Traffic:
    """Gathers of secondary shards, which are not compressed."""
    inside, leaving = 0.0, dict[int, float]()  # for each byte gathered: by the busiest rank to its node, and by each node to others
    for first in range(0, setting.world_size, neighbours):
        held = Counter(rank // setting.ranks_per_node for rank in range(first, first + neighbours))
        inside = max(inside, *((count - 1) / count for count in held.values()))
        following = [*held][1:] + [*held][:1]
        for node, behind in zip(held, following, strict=True):
            leaving[node] = leaving.get(node, 0.0) + 1 - held[behind] / neighbours
    each = _Load((neighbours - 1) / neighbours, inside, max(leaving.values()))
    sizes = [group.numel * setting.compute(group).itemsize for group in groups]
    loads = [_Load(size * each.sent, size * each.inside, size * each.leaving) for size in sizes]
    return _traffic("all_gather", "gather from neighbours", loads, setting)


def _reductions(op: str, purpose: str, groups: Iterable[GroupSize], setting: Setting, *, ranks: int | None = None) -> Traffic:
    ranks = ranks or setting.world_size

    def load(group: GroupSize) -> _Load:
        reduce = setting.reduce(group)
        size = group.numel * reduce.itemsize
        reduced = _lap(size, ranks, setting, widened=_SUM_BYTES // reduce.itemsize if reduce.itemsize < _SUM_BYTES else 1)
        return reduced + _lap(size, ranks, setting) if op == "all_reduce" else reduced

    return _traffic(op, purpose, [load(group) for group in groups], setting)


def _sums_on_nodes(groups: Iterable[GroupSize], setting: Setting) -> Traffic:
    """Sums, inside nodes, of gradients that will be packed."""
    node = setting.ranks_per_node
    sent = [group.numel * setting.reduce(group).itemsize * (node - 1) / node for group in groups]
    return _traffic("reduce_scatter", "add up gradients in nodes", [_Load(each, each, 0.0) for each in sent], setting)


def _exchanges(groups: Iterable[GroupSize], strategy: Strategy, setting: Setting) -> Traffic:
    """Exchanges of packed gradients: each rank sends every other rank that rank's part directly, or, of its node's sum, the parts of the
    ranks in its place on other nodes."""
    ranks = setting.shards(strategy)
    node = min(ranks, setting.ranks_per_node)

    def load(group: GroupSize) -> _Load:
        codec = setting.gradient_codec(group)
        assert codec is not None
        size = packed_bytes(codec, group, ranks)
        if setting.sums_on_nodes(strategy):
            leaving = size * (ranks - node) / ranks
            return _Load(leaving / node, 0.0, leaving)
        return _Load(size * (ranks - 1) / ranks, size * (node - 1) / ranks, size * node * (ranks - node) / ranks)

    return _traffic("all_to_all", "reduce gradients", [load(group) for group in groups], setting)


def _averages(groups: Iterable[GroupSize], shards: int, replicas: int, setting: Setting) -> Traffic:
    """Averages over the ranks of different nodes that hold the same shard."""
    sizes = [group.numel * setting.reduce(group).itemsize / shards for group in groups]
    sent = [2 * size * (replicas - 1) / replicas for size in sizes]
    return _traffic("all_reduce", "average over nodes", [_Load(each, 0.0, each * shards) for each in sent], setting)


def _traffic(op: str, purpose: str, loads: Sequence[_Load], setting: Setting) -> Traffic:
    """The traffic of one collective per load. Their time is that inside the node or that of its link, whichever is longer."""
    load = sum(loads, _Load())
    times = []
    for count, speed in ((load.inside, setting.inside_bytes_per_s), (load.leaving, setting.between_bytes_per_s)):
        if count and speed is None:
            return Traffic(op, purpose, len(loads), round(load.sent), None)
        times.append(count / speed if count and speed else 0.0)
    return Traffic(op, purpose, len(loads), round(load.sent), max(times))
