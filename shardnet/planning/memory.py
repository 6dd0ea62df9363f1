"""`MemoryPlan`: the bytes that one rank will hold.

[Note: units in flight] FSDP gathers a unit and the `prefetch` next ones, and the units around it stay gathered; with
SHARD_GRAD_OP all stay until their backward. In backward a unit collects its gradients while those of up to `prefetch` + 1
units are being reduced. Freed buffers are kept for the next ones, so the most that was in flight stays allocated: the
peaks of parameters and of gradients add up, though they come at different times. With units within units the sum may be a
little less.

[Note: packed buffers] Packed buffers exist from the start of a collective until they are unpacked: parameters of the unit
that is waited for and of the `prefetch` next ones, gradients of up to `prefetch` + 2 units, since one more is packed before
the oldest is waited for. This is the most, on a slow network: what arrives earlier is unpacked earlier. Full-size gradients
are free again once they are packed, or, where nodes add them up first, once they are added up, which may take as long. In
that case each rank packs, and keeps residuals for, what the ranks in its place need ([Note: sums inside nodes]).

[Note: copies] In an elastic training (shardnet.elastic) a rank keeps two copies of its parameters and optimizer state in host
memory: as of the last commit and as of the commit that is being made. It keeps the same of one other rank, unless several ranks
hold the same anyway.

[Note: CPU and GPU] With `cpu_offload` parameters, gradients and optimizer state are in the CPU's memory (shardnet/fsdp/offload.py),
and buffers in flight, residuals and activations on the GPU. Full parameters are then made whatever the strategy, since shards on
the CPU cannot serve as full parameters: with NO_SHARD all of them are on the GPU from forward to backward.

Not counted: activations that nobody has measured, what an optimizer needs while it steps, the collectives' own
buffers (such as those on the CPU through which a GPU's tensors pass), Python, torch and its allocator.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from shardnet.config import MIB
from shardnet.fsdp.compressed.codec import Codec
from shardnet.planning.model import GroupSize, ModelSize, UnitSize
from shardnet.planning.setting import Setting, Strategy, packed_bytes
from shardnet.sharding import shard_sizes

ZERO_1_BUCKET_BYTES = 25 * MIB  # ZeroOptimizer's default
ZERO_1_IN_FLIGHT = 2  # packed buckets of gradients at once
GENERATIONS = 2  # of the state of an elastic training: the committed one, and the one that is being committed


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of the rank that holds the most; shards of two ranks differ by at most one element per group."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # the most full parameters in flight
    reducing: int  # the most full-size gradients in flight
    secondary: int  # shards kept for backward's gathers: see [Note: secondary shards] in shardnet/fsdp/secondary.py
    residuals: int  # of error feedback, between steps
    packed: int  # the most that compression has in flight, sent and received
    copies: int  # copies that outlive lost workers: see [Note: copies]
    activations: int | None  # None: not known, and left out of the total
    offloaded: bool  # whether shards are on the CPU though a GPU computes

    @property
    def on_cpu(self) -> int:
        """The part of the total that is in the CPU's memory if a GPU computes: see [Note: CPU and GPU]."""
        return self.copies + (self.parameters + self.gradients + self.optimizer if self.offloaded else 0)

    @property
    def on_gpu(self) -> int:
        """The rest of the total."""
        return self.total - self.on_cpu

    @property
    def total(self) -> int:
        between_steps = self.parameters + self.gradients + self.optimizer + self.residuals
        in_flight = self.gathered + self.reducing + self.secondary + self.packed
        return between_steps + in_flight + self.copies + (self.activations or 0)


def plan_memory(model: ModelSize, strategy: Strategy, setting: Setting) -> MemoryPlan:
    """What a rank holds in a training with one backward per step."""
    shards = setting.shards(strategy)
    owned = setting.world_size if strategy is Strategy.ZERO_1 else shards  # ranks among which optimizer state is spread
    groups = [group for unit in model.units for group in unit.groups]
    trained = [group for group in groups if group.trainable]
    gradients = sum(_shard_bytes(group, shards) for group in trained)
    if strategy is Strategy.ZERO_1:
        gradients += sum(_shard_bytes(group, owned) for group in trained)  # the mean of its own part, besides the whole gradients
    return MemoryPlan(
        parameters=sum(_shard_bytes(group, shards) for group in groups),
        gradients=gradients,
        optimizer=sum(_optimizer_bytes(group, owned, setting) for group in trained),
        gathered=_gathered(model, strategy, setting),
        reducing=_reducing(model, strategy, setting),
        secondary=_secondary(model, strategy, setting),
        residuals=sum(_residual_bytes(group, strategy, setting) for group in trained),
        packed=_packed(model, strategy, setting),
        copies=_copies(groups, strategy, setting) if setting.elastic else 0,
        activations=model.activation_bytes,
        offloaded=setting.offloads(strategy),
    )


def _shard_bytes(group: GroupSize, shards: int) -> int:
    return -(-group.numel // shards) * group.dtype.itemsize


def _optimizer_bytes(group: GroupSize, shards: int, setting: Setting) -> int:
    return setting.optimizer.moments * _shard_bytes(group, shards) + setting.optimizer.counter_bytes * group.tensors


def _copies(groups: Sequence[GroupSize], strategy: Strategy, setting: Setting) -> int:
    """See [Note: copies]."""
    shards = setting.world_size if strategy is Strategy.ZERO_1 else setting.shards(strategy)
    kept = [group for group in groups if group.trainable or strategy is not Strategy.ZERO_1]
    held = sum(_shard_bytes(group, shards) + (_optimizer_bytes(group, shards, setting) if group.trainable else 0) for group in kept)
    entrusted = held if shards == setting.world_size > 1 else 0
    return GENERATIONS * (held + entrusted)


def _gathered(model: ModelSize, strategy: Strategy, setting: Setting) -> int:
    """See [Note: units in flight]. Where a rank has all shards, full parameters are made only to cast them, or to have them on a GPU."""

    def full_bytes(unit: UnitSize) -> int:
        return sum(group.numel * setting.compute(group).itemsize for group in unit.groups if made(group))

    def made(group: GroupSize) -> bool:
        return setting.shards(strategy) > 1 or setting.compute(group) != group.dtype or setting.offloads(strategy)

    match strategy:
        case Strategy.ZERO_1:
            return 0
        case _ if setting.resharding(strategy).keep:
            return sum(map(full_bytes, model.units))
        case _:
            return _most_at_once(model.units, setting.prefetch, lambda unit, _: full_bytes(unit))


def _secondary(model: ModelSize, strategy: Strategy, setting: Setting) -> int:
    """Secondary shards of every unit that is gathered again for backward: each unit has one when forward ends."""
    neighbours = setting.resharding(strategy).neighbours
    if neighbours is None:
        return 0
    groups = [group for index in setting.gathered_twice(model, strategy) for group in model.units[index].groups]
    return sum(-(-group.numel // neighbours) * setting.compute(group).itemsize for group in groups)


def _reducing(model: ModelSize, strategy: Strategy, setting: Setting) -> int:
    """See [Note: units in flight]."""

    def bytes_of(unit: UnitSize, collecting: bool) -> int:
        held = [group for group in unit.groups if group.trainable and (collecting or stays(group))]
        return sum(_gradient_bytes(group, setting, collecting=collecting) for group in held)

    def stays(group: GroupSize) -> bool:
        return setting.gradient_codec(group) is None or setting.sums_on_nodes(strategy)

    if strategy is Strategy.ZERO_1:
        buckets = sorted((min(bytes_of(unit, False), ZERO_1_BUCKET_BYTES) for unit in model.units), reverse=True)
        return sum(buckets[:ZERO_1_IN_FLIGHT])
    return _most_at_once(model.units, setting.prefetch + 1, bytes_of)


def _gradient_bytes(group: GroupSize, setting: Setting, *, collecting: bool) -> int:
    """Gradients are collected in a dtype that loses nothing, then copied into the dtype of the reduction if that is another one."""
    reduce = setting.reduce(group)
    collect = torch.promote_types(setting.compute(group), reduce)
    itemsize = reduce.itemsize + (collect.itemsize if collecting and collect != reduce else 0)
    return group.numel * itemsize


def _residual_bytes(group: GroupSize, strategy: Strategy, setting: Setting) -> int:
    residual = setting.compression.residual
    if residual is None or setting.gradient_codec(group) is None:
        return 0
    return sum(shard_sizes(group.numel, setting.shards(strategy))[:: _every(strategy, setting)]) * residual.itemsize


def _every(strategy: Strategy, setting: Setting) -> int:
    """The step n such that a rank packs gradients for every n-th rank."""
    return setting.ranks_per_node if setting.sums_on_nodes(strategy) else 1


def _packed(model: ModelSize, strategy: Strategy, setting: Setting) -> int:
    """See [Note: packed buffers]."""

    def bytes_of(groups: Iterable[GroupSize], codec_of: Callable[[GroupSize], Codec | None], every: int = 1) -> int:
        packed = ((codec_of(group), group) for group in groups)
        return sum(packed_bytes(codec, group, setting.shards(strategy), every) for codec, group in packed if codec is not None)

    parameters = [bytes_of(unit.groups, setting.weight_codec) for unit in model.units]
    every = _every(strategy, setting)
    gradients = [bytes_of([group for group in unit.groups if group.trainable], setting.gradient_codec, every) for unit in model.units]
    twice = setting.gathered_twice(model, strategy) if setting.resharding(strategy).neighbours is None else ()
    again = [count if index in twice else 0 for index, count in enumerate(parameters)]  # secondary shards are not packed
    most = 0
    for index in range(len(model.units)):
        after, before = index + 1 + setting.prefetch, max(index - setting.prefetch, 0)
        most = max(
            most,
            sum(parameters[index:after]),  # forward comes to the unit
            sum(again[before : index + 1]) + sum(gradients[index + 1 : after + 1]),  # backward comes to it
            sum(again[before:index]) + sum(gradients[index : after + 1]),  # its gradients are complete
        )
    return most


def _most_at_once(units: Sequence[UnitSize], ahead: int, bytes_of: Callable[[UnitSize, bool], int]) -> int:
    """The most bytes of a unit in use, the units around it, and the next `ahead` units. The root is around all units.

    `bytes_of(unit, in_use)` gives a unit's bytes.
    """
    most = 0
    for index, unit in enumerate(units):
        around = [other for other in units if unit.within(other)]
        following = [other for other in units[index + 1 :] if other not in around][:ahead]
        most = max(most, sum(bytes_of(each, True) for each in (unit, *around)) + sum(bytes_of(each, False) for each in following))
    return most
