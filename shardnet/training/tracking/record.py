"""`Record`: what was reported at one step."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from shardnet.errors import UsageError

OWN = ("step", "time", "epoch", "world_size")  # names that a record uses itself


def number(value: SupportsFloat) -> float:
    """A plain number; a tensor is detached, because of a loss that still has its graph torch would warn."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """A user's metrics as plain numbers, tensors of one element included. Raises UsageError for what cannot be written.

    It is checked here, where the user's own call is on the stack: on the tracker's thread one such value would end all tracking.
    """
    plain = {}
    for name, value in metrics.items():
        if name in OWN:
            raise UsageError(f"a metric cannot be called {name!r}: each record has a field of this name already; call it something else")
        try:
            plain[name] = number(value)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
            raise UsageError(f"metric {name!r} must be one number, got {type(value).__name__}: {error}") from error
    return plain


@dataclass(frozen=True, slots=True)
class Record:
    """The metrics of one step, by name; `at_s` is in seconds since 1970."""

    step: int
    at_s: float
    epoch: int
    world_size: int
    metrics: Mapping[str, float]

    def as_json(self) -> str:
        """One line. Values that are not finite become null, since JSON cannot express them."""
        head = dict(zip(OWN, (self.step, round(self.at_s, 3), self.epoch, self.world_size), strict=True))
        return json.dumps(head | {name: value if math.isfinite(value) else None for name, value in self.metrics.items()})
