"""Which parameters share a bucket."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardnet.fsdp.placement import UnitChoice, UnitPlan, plan_units
from shardnet.sharding import FlatLayout
from shardnet.zero.shard_map import balanced_owners
from shardnet.zero.split import Split

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A bucket before it is made."""

    unit: int | None  # whose forward waits for it, as an index of `Units.plans`; None: no forward does
    label: str
    named: tuple[tuple[str, Tensor], ...]
    layout: FlatLayout


class Units:
    """The parts of a module that wait for their parameters, and the parameters' names; empty without a module."""

    def __init__(self, module: nn.Module | None, choice: UnitChoice) -> None:
        self.plans: list[UnitPlan] = [] if module is None else plan_units(module, choice)
        self._unit: dict[Tensor, int] = {placed.parameter: index for index, plan in enumerate(self.plans) for placed in plan.parameters}
        self._name: dict[Tensor, str] = {placed.parameter: placed.name for plan in self.plans for placed in plan.parameters}

    def unit_of(self, parameter: Tensor) -> int | None:
        return self._unit.get(parameter)

    def needs(self, module: nn.Module) -> dict[nn.Module, set[int]]:
        """For each module, the units whose parameters its forward reads: its own unit, if it is one, and the units of the
        parameters that it holds itself, since a module may be called directly rather than by its unit."""
        needs = {plan.module: {index} for index, plan in enumerate(self.plans)}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                needs.setdefault(part, set()).add(self._unit[parameter])
        return needs

    def name_of(self, parameter: Tensor, default: str) -> str:
        return self._name.get(parameter, default)


def plan_buckets(
    named: Sequence[tuple[str, Tensor]], units: Units, split: Split, held: Sequence[int], bucket_bytes: int
) -> list[BucketPlan]:
    """Put parameters into buckets of one unit, dtype, device and `requires_grad`, of at most `bucket_bytes` each.

    A larger parameter has a bucket of its own. Frozen parameters have separate buckets, so that these need no work.
    Parameter groups have not: each parameter has a piece of its own, so one bucket may serve several groups. `held`
    says how many elements each rank owns already; whole parameters are balanced with regard to it.
    """
    world_size = len(held)
    parameters = [parameter for _, parameter in named]
    owners = dict(zip(parameters, balanced_owners([parameter.numel() for parameter in parameters], world_size, held=held), strict=True))
    plans = []
    for unit, alike in _by_kind(named, units):
        name = "parameters" if unit is None else units.plans[unit].name
        for members in _cut(alike, bucket_bytes):
            label = f"{name} (from {members[0][0]})"
            sizes = None
            if split is Split.PARAMETERS:
                members.sort(key=lambda entry: owners[entry[1]])
                sizes = [sum(parameter.numel() for _, parameter in members if owners[parameter] == rank) for rank in range(world_size)]
            layout = FlatLayout([(name, parameter.shape) for name, parameter in members], world_size, sizes=sizes)
            plans.append(BucketPlan(unit, label, tuple(members), layout))
    return plans


def _by_kind(named: Sequence[tuple[str, Tensor]], units: Units) -> Iterator[tuple[int | None, list[tuple[str, Tensor]]]]:
    kinds: dict[tuple[int | None, torch.dtype, torch.device, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        kind = (units.unit_of(parameter), parameter.dtype, parameter.device, parameter.requires_grad)
        kinds.setdefault(kind, []).append((name, parameter))
    return ((kind[0], members) for kind, members in kinds.items())


def _cut(named: Sequence[tuple[str, Tensor]], limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Runs of neighbours that hold at most `limit_bytes`, or one parameter."""
    run: list[tuple[str, Tensor]] = []
    run_bytes = 0
    for name, parameter in named:
        if run and run_bytes + parameter.nbytes > limit_bytes:
            yield run
            run, run_bytes = [], 0
        run.append((name, parameter))
        run_bytes += parameter.nbytes
    if run:
        yield run
