"""Which modules are units, and which unit each parameter belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardnet.errors import UsageError
from shardnet.fsdp.ignored import IgnoredModules

UnitChoice = type[nn.Module] | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """An attribute of a module that holds a parameter."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = parameter  # __setattr__ without its checks
        else:
            setattr(self.module, self.attribute, parameter)  # such as nn.LSTM, which keeps a list of its own


@dataclass(slots=True, eq=False)
class PlacedParameter:
    """A parameter with every place that holds it: more than one if it is tied."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)  # as in the state_dict; the first is its name in errors and layouts
    slots: list[Slot] = field(default_factory=list)
    chain: tuple[nn.Module, ...] = ()  # the units around all of its places, outermost first

    @property
    def name(self) -> str:
        return self.names[0]

    def _found(self, name: str, slot: Slot, chain: tuple[nn.Module, ...]) -> None:
        self.chain = _common_prefix(self.chain, chain) if self.names else chain
        self.names.append(name)
        if all((slot.module, slot.attribute) != (known.module, known.attribute) for known in self.slots):
            self.slots.append(slot)


@dataclass(frozen=True, slots=True, eq=False)
class UnitPlan:
    """A module that becomes a unit, with the parameters that it gathers."""

    name: str  # path within the wrapped module; the class name for the wrapped module itself
    module: nn.Module
    parameters: tuple[PlacedParameter, ...]


def plan_units(root: nn.Module, choice: UnitChoice, ignored: IgnoredModules | None = None) -> list[UnitPlan]:
    """The units in registration order, the root first; units without parameters of their own are left out.

    A parameter belongs to the innermost unit around it. One that is tied across units belongs to the innermost unit
    around all of its places, so that it is gathered whenever one of them is used. Those of `ignored` belong to none.
    """
    chosen = _choose(root, choice)
    ignored = ignored or IgnoredModules(root, ())
    ignored.refuse_units((name, module) for module, name in chosen.items())
    owned: dict[nn.Module, list[PlacedParameter]] = {module: [] for module in chosen}
    for placed in _place(root, chosen):
        if placed.parameter not in ignored.parameters:
            owned[placed.chain[-1]].append(placed)
    return [UnitPlan(name, module, tuple(owned[module])) for module, name in chosen.items() if module is root or owned[module]]


def parts_of(unit: UnitPlan, units: Sequence[UnitPlan]) -> list[nn.Module]:
    """The modules below `unit` that hold parameters of it, or that contain such modules, without those of inner `units`: calling one of
    them alone needs `unit`."""
    holders = {slot.module for placed in unit.parameters for slot in placed.slots}
    heads = {other.module for other in units}
    known: dict[nn.Module, bool] = {}

    def needs_unit(module: nn.Module) -> bool:
        if module not in known:
            known[module] = module in holders
            inner = [needs_unit(child) for child in module.children() if child not in heads]
            known[module] = known[module] or any(inner)
        return known[module]

    needs_unit(unit.module)
    return [module for module, needs in known.items() if needs and module is not unit.module]


def _choose(root: nn.Module, choice: UnitChoice) -> dict[nn.Module, str]:
    wanted = _predicate(root, choice)
    units = {root: type(root).__name__}
    for name, module in root.named_modules():
        if name and wanted(name, module):
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise UsageError(f"{name} is a {type(module).__name__}, which has no forward: make its members units instead")
            units[module] = name
    return units


def _predicate(root: nn.Module, choice: UnitChoice) -> Callable[[str, nn.Module], bool]:
    if choice is None:
        return lambda name, module: False
    if callable(choice) and not isinstance(choice, type):
        return choice
    types: tuple[Any, ...] = tuple(choice) if isinstance(choice, Sequence) else (choice,)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in types):
        raise UsageError(f"units must be module classes or a predicate (name, module) -> bool, got {choice!r}")
    if types and not any(isinstance(module, types) for module in root.modules()):
        wanted = " or ".join(kind.__name__ for kind in types)
        known = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
        raise UsageError(f"units: the model has no {wanted}; its modules are {known}")  # otherwise all of it would be one unit
    return lambda name, module: isinstance(module, types)


def _place(root: nn.Module, units: dict[nn.Module, str]) -> list[PlacedParameter]:
    """Every parameter once, in registration order, with all its places: modules reached by several paths included."""
    placed: dict[nn.Parameter, PlacedParameter] = {}
    modules = dict(root.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        chain = _chain(path, modules, units)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{attribute}" if path else attribute
                placed.setdefault(parameter, PlacedParameter(parameter))._found(name, Slot(module, attribute), chain)
    return list(placed.values())


def _chain(path: str, modules: dict[str, nn.Module], units: dict[nn.Module, str]) -> tuple[nn.Module, ...]:
    """The units on the way from the root to a module, itself included."""
    steps = path.split(".") if path else []
    prefixes = [".".join(steps[:count]) for count in range(len(steps) + 1)]
    return tuple(modules[prefix] for prefix in prefixes if modules[prefix] in units)


def _common_prefix(left: tuple[nn.Module, ...], right: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    length = 0
    while length < min(len(left), len(right)) and left[length] is right[length]:
        length += 1
    return left[:length]
