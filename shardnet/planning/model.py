"""`ModelSize`: all that planning needs of a model, the sizes of its units."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardnet.errors import UsageError
from shardnet.fsdp.placement import PlacedParameter, UnitChoice, plan_units


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Parameters of a unit that are of one kind, so that they form one flat buffer."""

    numel: int
    dtype: torch.dtype  # in which the parameters are kept and stepped
    trainable: bool = True
    tensors: int = 1  # how many parameters it has


@dataclass(frozen=True, slots=True)
class UnitSize:
    """Parameters that are gathered, used and freed together."""

    name: str  # path within the model; "" for the root
    groups: tuple[GroupSize, ...]

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    def within(self, other: "UnitSize") -> bool:
        """Whether this unit lies in another one, which then is in use whenever this one is."""
        return self is not other and (not other.name or self.name.startswith(f"{other.name}."))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Units in order of use, the root first; and the bytes that a forward keeps for backward, None if not known."""

    name: str
    units: tuple[UnitSize, ...]
    activation_bytes: int | None = None

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def unit_count(self) -> int:
        """Units that have parameters: the root may have none."""
        return sum(unit.numel > 0 for unit in self.units)

    @property
    def largest(self) -> int:
        """Parameters of the largest unit."""
        return max(unit.numel for unit in self.units)

    @classmethod
    def of_module(cls, name: str, module: nn.Module, units: UnitChoice = None, *, activation_bytes: int | None = None) -> "ModelSize":
        """A module, on the meta device or any other, cut into units as FSDP would. Raises UsageError if it has no parameters."""
        planned = plan_units(module, units)
        sizes = tuple(UnitSize(plan.name if plan.module is not module else "", _groups(plan.parameters)) for plan in planned)
        if not any(unit.numel for unit in sizes):
            raise UsageError(f"{name} has no parameters: there is nothing to plan")
        return cls(name, sizes, activation_bytes)

    @classmethod
    def of_sizes(cls, parameters: int, layers: int, *, root: int = 0, dtype: torch.dtype = torch.float32) -> "ModelSize":
        """A model of `parameters` in all, `root` of them in the root unit and the rest in equal layers, each a unit."""
        if layers < 1:
            raise UsageError(f"layers must be at least 1, got {layers}")
        if not 0 <= root < parameters:
            raise UsageError(f"the root unit must have at least 0 parameters and fewer than all {parameters:,}, got {root:,}")
        if parameters - root < layers:
            raise UsageError(f"{parameters - root:,} parameters are too few for {layers:,} layers")
        size, longer = divmod(parameters - root, layers)
        units = [UnitSize(f"layers.{index}", (GroupSize(size + (index < longer), dtype),)) for index in range(layers)]
        return cls("sizes", (UnitSize("", (GroupSize(root, dtype),) if root else ()), *units))

    @classmethod
    def of_transformer(cls, hidden: int, layers: int, vocabulary: int, *, dtype: torch.dtype = torch.float32) -> "ModelSize":
        """A GPT: 12·hidden² + 13·hidden parameters per layer, as in GPT-2; the embedding, tied to the head, and the last norm are in the
        root."""
        if min(hidden, layers, vocabulary) < 1:
            raise UsageError(f"hidden, layers and vocabulary must be at least 1, got {hidden}, {layers} and {vocabulary}")
        root = vocabulary * hidden + 2 * hidden
        return cls.of_sizes(root + layers * (12 * hidden**2 + 13 * hidden), layers, root=root, dtype=dtype)


def _groups(placed: Sequence[PlacedParameter]) -> tuple[GroupSize, ...]:
    """Group parameters as FSDP does: by dtype and by whether they are trained."""
    kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in (entry.parameter for entry in placed):
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return tuple(
        GroupSize(sum(parameter.numel() for parameter in members), dtype, trainable, len(members))
        for (dtype, trainable), members in kinds.items()
    )
