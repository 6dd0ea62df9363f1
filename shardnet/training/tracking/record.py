"""`Record`: what was reported at one step."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """The metrics of one step, by name; `at_s` is in seconds since 1970."""

    step: int
    at_s: float
    epoch: int
    world_size: int
    metrics: Mapping[str, float]

    def as_json(self) -> str:
        """One line. What is no finite number is null: JSON has no other word for it."""
        head = {"step": self.step, "time": round(self.at_s, 3), "epoch": self.epoch, "world_size": self.world_size}
        return json.dumps(head | {name: value if math.isfinite(value) else None for name, value in self.metrics.items()})
