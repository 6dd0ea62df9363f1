"""`Plan`: what one strategy costs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardnet.errors import UsageError
from shardnet.planning.memory import MemoryPlan, plan_memory
from shardnet.planning.model import ModelSize
from shardnet.planning.setting import Setting, Strategy
from shardnet.planning.traffic import Traffic, plan_traffic, sends_whole


@dataclass(frozen=True, slots=True)
class Plan:
    """A rank's memory and the traffic of a step under one strategy."""

    strategy: Strategy
    memory: MemoryPlan
    traffic: tuple[Traffic, ...]
    reshard_after_forward: bool | int | None = None  # as requested; None also where it does not apply
    cpu_offload: bool = False  # as requested; False also where it does not apply
    sends_whole: bool = False  # whether, where no GPU computes, little gradients are sent more often than planned

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in one step."""
        return sum(traffic.bytes_sent for traffic in self.traffic)

    @property
    def communication_s(self) -> float | None:
        """The time of all collectives one after the other; how much of it compute hides is not estimated. None without speeds."""
        times = [traffic.seconds for traffic in self.traffic]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None


def plan(model: ModelSize, setting: Setting, strategies: Iterable[Strategy] = ()) -> list[Plan]:
    """A plan for each strategy; if none is named, for all that differ in this world.

    Raises UsageError for what FSDP refuses: parameters gathered in a wider dtype than they are kept in, compression that
    contradicts the dtypes, or a `reshard_after_forward` that contradicts a strategy; and for `cpu_offload` with ZeRO-1. If no
    strategy is named, these options must suit FULL_SHARD; strategies that they do not suit are planned without them.
    """
    for group in (group for unit in model.units for group in unit.groups):
        if setting.compute(group).itemsize > group.dtype.itemsize:
            raise UsageError(f"parameters kept in {group.dtype} cannot be gathered as {setting.compute(group)}, which is wider")
    if named := list(strategies):
        return [_plan(model, strategy, setting) for strategy in named]
    different = [strategy for strategy in Strategy if strategy is not Strategy.HYBRID_SHARD or setting.nodes > 1]
    return [_plan(model, strategy, _suiting(strategy, setting)) for strategy in different]


def _suiting(strategy: Strategy, setting: Setting) -> Setting:
    """The setting, without a `cpu_offload` or `reshard_after_forward` that other strategies accept and this one does not."""
    if strategy is Strategy.ZERO_1:
        setting = replace(setting, cpu_offload=False)
    try:
        setting.resharding(strategy)
    except UsageError:
        if strategy is Strategy.FULL_SHARD:
            raise
        return replace(setting, reshard_after_forward=None)
    return setting


def _plan(model: ModelSize, strategy: Strategy, setting: Setting) -> Plan:
    if strategy is Strategy.ZERO_1 and setting.mixed:  # a plain module, which computes in the dtype that it is kept in
        setting = replace(setting, compute_dtype=None, reduce_dtype=None)
        model = replace(model, activation_bytes=None)  # measured in the other dtype
    setting = replace(setting, compression=setting.compression_under(strategy))
    memory, traffic = plan_memory(model, strategy, setting), plan_traffic(model, strategy, setting)
    whole = sends_whole(model, strategy, setting)
    return Plan(strategy, memory, traffic, setting.reshard_after_forward, setting.cpu_offload, whole)
