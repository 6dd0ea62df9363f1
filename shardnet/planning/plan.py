"""`Plan`: what one strategy costs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardnet.errors import UsageError
from shardnet.planning.memory import MemoryPlan, plan_memory
from shardnet.planning.model import ModelSize
from shardnet.planning.setting import Setting, Strategy
from shardnet.planning.traffic import Traffic, plan_traffic


@dataclass(frozen=True, slots=True)
class Plan:
    """A rank's memory and the traffic of a step under one strategy."""

    strategy: Strategy
    memory: MemoryPlan
    traffic: tuple[Traffic, ...]

    @property
    def bytes_sent(self) -> int:
        """By one rank in one step."""
        return sum(traffic.bytes_sent for traffic in self.traffic)

    @property
    def communication_s(self) -> float | None:
        """Of all collectives one after the other; how much of it compute hides is not guessed. None without speeds."""
        times = [traffic.seconds for traffic in self.traffic]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None


def plan(model: ModelSize, setting: Setting, strategies: Iterable[Strategy] = ()) -> list[Plan]:
    """A plan for each strategy; without any named, for all that differ in this world.

    Raises UsageError for what FSDP refuses: parameters gathered in a wider dtype than they are kept in, or compression that
    contradicts the dtypes.
    """
    for group in (group for unit in model.units for group in unit.groups):
        if setting.compute(group).itemsize > group.dtype.itemsize:
            raise UsageError(f"parameters kept in {group.dtype} cannot be gathered as {setting.compute(group)}, which is wider")
    chosen = list(strategies) or [strategy for strategy in Strategy if strategy is not Strategy.HYBRID_SHARD or setting.nodes > 1]
    return [_plan(model, strategy, setting) for strategy in chosen]


def _plan(model: ModelSize, strategy: Strategy, setting: Setting) -> Plan:
    if strategy is Strategy.ZERO_1 and setting.mixed:  # a plain module, which computes in what it is kept in
        setting = replace(setting, compute_dtype=None, reduce_dtype=None)
        model = replace(model, activation_bytes=None)  # measured in the other dtype
    setting = replace(setting, compression=setting.compression_under(strategy))
    return Plan(strategy, plan_memory(model, strategy, setting), plan_traffic(model, strategy, setting))
