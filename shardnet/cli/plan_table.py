"""The output of `shardnet plan`: plans as text or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from shardnet.cli.grid import grid
from shardnet.cli.units import short_bytes, short_time
from shardnet.planning import ModelSize, Plan, Setting, Strategy
from shardnet.planning.model import GroupSize
from shardnet.planning.traffic import WHOLE_BYTES

NAMES = {
    Strategy.FULL_SHARD: "FULL_SHARD (ZeRO-3)",
    Strategy.SHARD_GRAD_OP: "SHARD_GRAD_OP (ZeRO-2)",
    Strategy.HYBRID_SHARD: "HYBRID_SHARD",
    Strategy.ZERO_1: "ZeroOptimizer (ZeRO-1)",
    Strategy.NO_SHARD: "NO_SHARD (DDP)",
}
_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "reducing", "secondary", "residuals", "packed", "copies", "activations")
_SOMETIMES = ("secondary", "residuals", "packed", "copies")  # columns that are left out if no plan has any, for example without compression
_TOTALS = {"a rank holds": "total"}
_TOTALS_OFFLOADED = {"on the CPU": "on_cpu", "on the GPU": "on_gpu"}
_WORDS = frozenset({"strategy", "collective", "to"})
_NONE = "-"


def as_text(model: ModelSize, setting: Setting, plans: Sequence[Plan]) -> str:
    parts = [
        _about(model, setting),
        _costs(setting, plans),
        _collectives(plans) if setting.world_size > 1 else "a rank alone sends nothing",
        "\n".join(_notes(model, setting, plans)),
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(model: ModelSize, setting: Setting, plans: Sequence[Plan]) -> str:
    """Plans in bytes and seconds; unknown values are null."""
    about = {
        "model": model.name,
        "parameters": model.numel,
        "units": model.unit_count,
        "world_size": setting.world_size,
        "node_size": setting.ranks_per_node,
        "optimizer": setting.optimizer,
        "prefetch": setting.prefetch,
        "compression": {"weights": setting.compression.weights, "gradients": setting.compression.gradients},
    }
    return json.dumps(about | {"plans": [_as_dict(setting, plan) for plan in plans]}, indent=2, allow_nan=False)


def _as_dict(setting: Setting, plan: Plan) -> dict[str, object]:
    memory = {name: getattr(plan.memory, name) for name in _MEMORY} | {"total": plan.memory.total}
    places = {name: getattr(plan.memory, name) if setting.cpu_offload else None for name in _TOTALS_OFFLOADED.values()}
    return {
        "strategy": plan.strategy,
        "reshard_after_forward": plan.reshard_after_forward,
        "cpu_offload": plan.cpu_offload,
        "memory": memory | places,
        "bytes_sent": plan.bytes_sent,
        "communication_s": plan.communication_s,
        "traffic": [asdict(traffic) for traffic in plan.traffic],
    }


def _about(model: ModelSize, setting: Setting) -> str:
    groups = [group for unit in model.units for group in unit.groups]
    cut = f"{model.unit_count} units, the largest of {model.largest:,}" if model.unit_count > 1 else "one unit"
    nodes = f" on {setting.nodes} nodes of {setting.ranks_per_node}" if setting.nodes > 1 else ""
    ranks = "1 rank" if setting.world_size == 1 else f"{setting.world_size} ranks"
    resharding = "" if setting.reshard_after_forward is None else f", reshard_after_forward={setting.reshard_after_forward}"
    offload = ", cpu_offload" if setting.cpu_offload else ""
    return (
        f"{model.name}: {model.numel:,} parameters in {_dtypes(groups, setting)}; {cut}\n"
        f"{ranks}{nodes}; {setting.optimizer}, prefetch {setting.prefetch}{resharding}{offload}{_compressed(setting)}"
    )


def _compressed(setting: Setting) -> str:
    """For example `; sent compressed: weights as int8, gradients as int8`."""
    sent = [f"{name} as {kind}" for name in ("weights", "gradients") if (kind := getattr(setting.compression, name))]
    return f"; sent compressed: {', '.join(sent)}" if sent else ""


def _dtypes(groups: Sequence[GroupSize], setting: Setting) -> str:
    """For example `float32, gathered as bfloat16, reduced as float32`."""
    kept, computed, reduced = (
        " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
        for dtypes in (
            [group.dtype for group in groups],
            [setting.compute(group) for group in groups],
            [setting.reduce(group) for group in groups],
        )
    )
    gathered = f", gathered as {computed}" if computed != kept else ""
    return kept + gathered + (f", reduced as {reduced}" if reduced != computed else "")


def _costs(setting: Setting, plans: Sequence[Plan]) -> str:
    held = [name for name in _MEMORY if name not in _SOMETIMES or any(getattr(plan.memory, name) for plan in plans)]
    totals = _TOTALS_OFFLOADED if setting.cpu_offload else _TOTALS
    rows = [
        (
            NAMES[plan.strategy],
            *(_NONE if count is None else short_bytes(count) for count in (getattr(plan.memory, name) for name in held)),
            *(short_bytes(getattr(plan.memory, name)) for name in totals.values()),
            short_bytes(plan.bytes_sent),
            _NONE if plan.communication_s is None else short_time(plan.communication_s),
        )
        for plan in plans
    ]
    return grid(("strategy", *held, *totals, "sends a step", "time"), rows, _WORDS)


def _collectives(plans: Sequence[Plan]) -> str:
    head = ("strategy", "collective", "to", "a step", "a rank sends", "time")
    rows = []
    for plan in plans:
        names = iter([NAMES[plan.strategy]])
        for each in plan.traffic:
            time = _NONE if each.seconds is None else short_time(each.seconds)
            rows.append((next(names, ""), each.op, each.purpose, f"{each.count}", short_bytes(each.bytes_sent), time))
    return grid(head, rows, _WORDS)


def _notes(model: ModelSize, setting: Setting, plans: Sequence[Plan]) -> Iterator[str]:
    """What a reader must know about the figures."""
    if model.activation_bytes is None:
        yield "Not counted: activations, since there is no model with an --input to measure them by."
    if any(plan.communication_s is None for plan in plans):
        yield "No times, since the links' speeds are not given (--inside, and --between for several nodes)."
    elif any(plan.traffic for plan in plans):
        yield "Times are those of the links alone; how much of that time overlaps with compute is not estimated."
    groups = [group for unit in model.units for group in unit.groups]
    if setting.nodes > 1 and setting.ranks_per_node > 1 and any(setting.reduce(group).itemsize == 2 for group in groups):
        yield "Nodes send each other sums of 16-bit gradients as float32, in twice the bytes; HYBRID_SHARD's averages remain 16-bit."
    if any(setting.sums_on_nodes(plan.strategy) for plan in plans):
        yield "Nodes add up gradients before they compress them. On GPUs they do not add them up first, and send more to each other."
    elif setting.nodes > 1 and setting.ranks_per_node > 1 and setting.compression.gradients is not None:
        directly = "Compressed gradients are exchanged directly instead of in a ring; this sends more between nodes"
        yield f"{directly}: compare a plan that does not compress them."
    if whole := [NAMES[plan.strategy] for plan in plans if plan.sends_whole]:
        yield (
            f"Where no GPU computes, a unit's gradients of up to {short_bytes(WHOLE_BYTES)} go whole to every rank of the node: "
            f"up to {setting.ranks_per_node} times the bytes that are planned here to reduce them, with {', '.join(whole)}."
        )
    if setting.mixed and any(plan.strategy is Strategy.ZERO_1 for plan in plans):
        yield "ZeRO-1 is planned in the dtype that parameters are kept in, since a plain module computes in it."
    if _compressed(setting) and not all(plan.strategy.sends_shards for plan in plans):
        yield "ZeRO-1 and NO_SHARD are planned without compression, since FSDP sends no shards there."
    if without := [NAMES[plan.strategy] for plan in plans if plan.reshard_after_forward != setting.reshard_after_forward]:
        yield f"Planned without reshard_after_forward={setting.reshard_after_forward}, which does not suit {', '.join(without)}."
    if setting.cpu_offload:
        yield "With cpu_offload, parameters, gradients and the optimizer's state are on the CPU; the GPU has only what is in flight."
    if setting.cpu_offload and not all(plan.cpu_offload for plan in plans):
        yield "ZeRO-1 is planned without cpu_offload, which only FSDP has."
    if setting.elastic:
        yield "Copies are those of the last committed step, in host memory: of the rank's own state, and of another rank's."
    if model.unit_count == 1:
        yield "Everything is gathered at once, since the model is one unit: name classes with --units."
