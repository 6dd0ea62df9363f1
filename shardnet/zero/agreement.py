"""What all ranks must agree on in each step before any of them acts: gradients and options; and the lines that describe an optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.backend import ReduceOp
from shardnet.errors import StateError
from shardnet.fsdp.communicators import Communicators

Tensor = torch.Tensor
_NO_OPTION = ("params", "param_names")
_TOLERANCE = 1e-6  # relative: different kinds of machines may compute a schedule with different last bits


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """What the ranks have learnt about each other."""

    someone: list[bool]  # for each parameter: whether any rank has a gradient
    everyone: list[bool]  # and whether all have
    again: list[bool]  # for each bucket: whether any rank started it too early


def agree_on_step(
    present: Sequence[bool], again: Sequence[bool], groups: Sequence[Mapping[str, Any]], comms: Communicators
) -> StepAgreement:
    """Which parameters have gradients, and which buckets must be reduced again. One all-reduce.

    Raises StateError on all ranks if the groups' numbers (learning rates, ...) differ: each rank would step its slice by
    another rule, for example if a scheduler follows each rank's own loss.
    """
    options = numbers_of(groups)
    flags = torch.tensor([*present, *(not flag for flag in present), *again], dtype=torch.float64, device="cpu")
    values = torch.tensor(list(options.values()), dtype=torch.float64, device="cpu")
    message = torch.cat([flags, values, -values])
    agreed = comms.wait(comms.everyone.all_reduce(message, ReduceOp.MAX, label="which parameters have gradients, and the options"), "agree")
    someone, lacking, too_early, highest, lowest = agreed.split_with_sizes(
        [len(present), len(present), len(again), len(values), len(values)]
    )
    for name, high, low in zip(options, highest.tolist(), (-lowest).tolist(), strict=True):
        if not (high == low or high - low <= _TOLERANCE * abs(high)):
            raise StateError(
                f"[rank {comms.everyone.rank}/{comms.everyone.world_size}] {name} is {low:g} on one rank and {high:g} on another; "
                "set this option alike on all ranks (give a scheduler the loss averaged over ranks, not each rank's own)"
            )
    return StepAgreement(*([bool(flag) for flag in flags.tolist()] for flags in (someone, lacking == 0, too_early)))


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Every number among the groups' options, by a name for messages."""
    found = {}
    for index, group in enumerate(groups):
        for key in sorted(group.keys() - set(_NO_OPTION)):
            values = group[key] if isinstance(group[key], list | tuple) else [group[key]]
            for place, value in enumerate(values):
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                if isinstance(value, bool | int | float):
                    found[f"{key}{f'[{place}]' if len(values) > 1 else ''} of group {index}"] = float(value)
    return found


def describe(groups: Sequence[Mapping[str, Any]], named: Mapping[int, Sequence[tuple[str, Tensor]]]) -> list[str]:
    """The lines for `check_alike` (fsdp/alike.py): some groups' options, by index, and their parameters."""
    lines = []
    for index, parameters in named.items():
        options = {key: value for key, value in sorted(groups[index].items()) if key not in _NO_OPTION}
        plain = [f"{key}={value}" for key, value in options.items() if value is None or isinstance(value, bool | int | float | str | tuple)]
        lines.append(f"group {index} of {len(parameters)} parameters with {', '.join(plain)}")
        for name, parameter in parameters:
            frozen = "" if parameter.requires_grad else ", frozen"
            lines.append(f"{name} ({str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}{frozen})")
    return lines
