"""The collectives of one step, and how long the links need for them.

[Note: load of a link] Around a ring of N ranks each one passes on (N - 1) / N of the buffer, an all-reduce twice that. A
ring enters and leaves every node once, so that much is also what a node's link carries. In HYBRID_SHARD each of a node's
n ranks has a ring of its own across nodes, and the link carries all of them. Sums of 16-bit floats are no ring
(shardnet/collectives/plans.py): each rank sends every other one its part directly, so that of each of a node's n ranks
1 / N of the buffer goes to every rank outside. Nor are compressed gradients, which are sent so, too (all_to_all).

Times are those of the busiest link at the speed given, without latency, packing, and what compute hides or delays.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shardnet.planning.model import GroupSize, ModelSize
from shardnet.planning.setting import Setting, Strategy, packed_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind and purpose in one step, as one rank sends them."""

    op: str  # all_gather, reduce_scatter, all_to_all, all_reduce
    purpose: str
    count: int
    bytes_sent: int  # by one rank
    seconds: float | None  # None: the speed of the links is not given


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
                _gathers("gather what was stepped", trained, setting.world_size, setting, cast=False),
            ]
        case _:
            planned = [_gathers("gather for forward", groups, shards, setting)]
            again = [group for index in setting.gathered_twice(model, strategy) for group in model.units[index].groups]
            planned.append(_gathers("gather for backward", again, shards, setting))
            packed = [group for group in trained if setting.gradient_codec(group) is not None]
            plain = [group for group in trained if setting.gradient_codec(group) is None]
            planned.append(_reductions("all_to_all", "reduce gradients", packed, setting, ranks=shards))
            planned.append(_reductions("reduce_scatter", "reduce gradients", plain, setting, ranks=shards))
            if strategy is Strategy.HYBRID_SHARD:
                planned.append(_averages(trained, shards, replicas, setting))
    return tuple(traffic for traffic in planned if traffic.bytes_sent)


def _gathers(purpose: str, groups: Iterable[GroupSize], ranks: int, setting: Setting, *, cast: bool = True) -> Traffic:
    def size(group: GroupSize) -> int:
        if cast and (codec := setting.weight_codec(group)) is not None:
            return packed_bytes(codec, group, ranks)
        return group.numel * (setting.compute(group) if cast else group.dtype).itemsize

    sizes = [size(group) for group in groups]
    sent = sum(sizes) * (ranks - 1) / ranks
    return Traffic("all_gather", purpose, len(sizes), round(sent), _seconds(sent, sent if ranks > setting.ranks_per_node else 0, setting))


def _reductions(op: str, purpose: str, groups: Iterable[GroupSize], setting: Setting, *, ranks: int | None = None) -> Traffic:
    ranks = ranks or setting.world_size
    passes = 2 if op == "all_reduce" else 1

    def size(group: GroupSize) -> tuple[int, bool]:
        """Bytes, and whether they are exchanged directly."""
        if (codec := setting.gradient_codec(group)) is not None:
            return packed_bytes(codec, group, ranks), True
        return group.numel * setting.reduce(group).itemsize, setting.reduce(group).itemsize == 2

    sizes = [size(group) for group in groups]
    sent = passes * sum(count for count, _ in sizes) * (ranks - 1) / ranks
    leaving = 0.0
    if ranks > setting.ranks_per_node:
        direct = setting.ranks_per_node * (ranks - setting.ranks_per_node) / ranks
        ring = (ranks - 1) / ranks
        leaving = sum(count * ((direct if directly else ring) + (passes - 1) * ring) for count, directly in sizes)
    return Traffic(op, purpose, len(sizes), round(sent), _seconds(sent, leaving, setting))


def _averages(groups: Iterable[GroupSize], shards: int, replicas: int, setting: Setting) -> Traffic:
    """Over the ranks of different nodes that hold the same shard."""
    sizes = [group.numel * setting.reduce(group).itemsize / shards for group in groups]
    sent = 2 * sum(sizes) * (replicas - 1) / replicas
    return Traffic("all_reduce", "average over nodes", len(sizes), round(sent), _seconds(0, sent * shards, setting))


def _seconds(sent: float, leaving: float, setting: Setting) -> float | None:
    """For what a rank sends in its node and for what leaves the node, whichever takes longer; see [Note: load of a link]."""
    times = []
    for load, speed in ((sent, setting.inside_bytes_per_s), (leaving, setting.between_bytes_per_s)):
        if load and speed is None:
            return None
        times.append(load / speed if load and speed else 0.0)
    return max(times)
