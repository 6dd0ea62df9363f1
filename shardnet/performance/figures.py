"""`TrainingFigures`: how fast a training was, and what held it up. Nothing here is counted twice."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shardnet.errors import ProtocolError, UsageError


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """Some steps of one rank or, after `merge`, of all ranks of a cluster; times in seconds.

    A step lasts from the end of one optimizer step to the end of the next, whatever is done in between.
    Figures that are said to be summed over ranks are so after a merge; before one they are the rank's own.
    """

    ranks: int = 1
    steps: int = 0
    wall_s: float = 0.0  # of all steps; for several ranks the slowest rank's, since they step together
    step_s: tuple[float, ...] = ()  # the last steps, one by one, oldest first; for several ranks each step's slowest
    samples: int = 0  # each counted once; summed over ranks
    tokens: int = 0  # likewise
    rank_s: float = 0.0  # wall time summed over ranks, as are all figures below
    compute_s: float = 0.0  # forward, backward and optimizer, without waiting
    exposed_s: float = 0.0  # the training thread waited for communication: not overlapped with compute; NaN: not measured
    communicating_s: float = 0.0  # at least one collective was under way; time in which several overlap counts once
    bytes_sent: int = 0
    network_bytes: int = 0  # the part of them that went to ranks with which no memory is shared
    # What the links from node to node could have sent in communicating_s, each counted for the rank whose next rank is on another node; 0:
    # for no rank, None: not measured.
    capacity_bytes: float | None = None

    # --- rates

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together, over wall time."""
        return _ratio(self.samples, self.wall_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together, over wall time."""
        return _ratio(self.tokens, self.wall_s)

    def step_percentile(self, percent: float) -> float:
        """The step time that `percent` of the last steps did not exceed; NaN before the first. Nearest rank: a time that occurred."""
        if not 0 <= percent <= 100:
            raise UsageError(f"percent must be from 0 to 100, got {percent}")
        ordered = sorted(self.step_s)
        return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else math.nan

    # --- shares, from 0 to 1

    @property
    def efficiency(self) -> float:
        """The part of the ranks' time that was not lost to waiting for communication: 1 if compute hides all of it; NaN: not measured."""
        return 1 - self.exposed_share

    @property
    def exposed_share(self) -> float:
        """The part of the ranks' time in which they waited for communication; NaN: not measured."""
        return _ratio(self.exposed_s, self.rank_s)

    @property
    def compute_share(self) -> float:
        """The part in which they computed. The time that is neither, such as loading data, is the program's own."""
        return _ratio(self.compute_s, self.rank_s)

    @property
    def hidden_share(self) -> float:
        """The part of communication that went on while the ranks did something else; 1 without communication, NaN: not measured."""
        if not self.communicating_s:
            return 1.0
        return max(1 - self.exposed_s / self.communicating_s, 0.0)  # in this order a NaN stays one

    @property
    def link_share(self) -> float | None:
        """Bytes sent over the network, relative to what the links between nodes could have sent in that time; None if there are none, or
        they were not measured. It is below 1 also because collectives wait for other ranks. It describes a cluster: the ranks of a node
        share its link, which counts for only one of them."""
        return self.network_bytes / self.capacity_bytes if self.capacity_bytes else None

    # --- several ranks

    @classmethod
    def merge(cls, figures: Iterable["TrainingFigures"]) -> "TrainingFigures":
        """The cluster's figures from those of its ranks, over the same steps. Raises UsageError if the numbers of steps differ."""
        parts = list(figures)
        if not parts:
            raise UsageError("there are no figures to merge")
        if len({part.steps for part in parts}) > 1:
            raise UsageError(
                f"ranks have measured {', '.join(str(part.steps) for part in parts)} steps: take all figures after the same step"
            )
        capacities = [part.capacity_bytes for part in parts if part.capacity_bytes is not None]
        return cls(
            ranks=sum(part.ranks for part in parts),
            steps=parts[0].steps,
            wall_s=max(part.wall_s for part in parts),
            step_s=tuple(max(times) for times in zip(*(part.step_s for part in parts), strict=True)),
            samples=sum(part.samples for part in parts),
            tokens=sum(part.tokens for part in parts),
            rank_s=sum(part.rank_s for part in parts),
            compute_s=sum(part.compute_s for part in parts),
            exposed_s=sum(part.exposed_s for part in parts),
            communicating_s=sum(part.communicating_s for part in parts),
            bytes_sent=sum(part.bytes_sent for part in parts),
            network_bytes=sum(part.network_bytes for part in parts),
            capacity_bytes=sum(capacities) if len(capacities) == len(parts) else None,
        )

    # --- as text and numbers

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists, for another rank or a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "TrainingFigures":
        """What `to_json` gave. Raises ProtocolError for anything else."""
        try:
            return cls(**{**values, "step_s": tuple(values["step_s"])})
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not the JSON of TrainingFigures: {error!r}") from error

    def __str__(self) -> str:
        if not self.steps:
            return "no steps yet"
        half, most, worst = (1e3 * self.step_percentile(percent) for percent in (50, 90, 99))
        parts = [
            f"{self.steps:,} steps of {self.ranks} rank{'s' * (self.ranks > 1)}, median {half:.1f} ms (90 %: {most:.1f}, 99 %: {worst:.1f})"
        ]
        if self.samples:
            parts.append(f"{self.samples_per_s:,.1f} samples/s")
        if self.tokens:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        communication = "time spent waiting for communication is not measured"
        if not math.isnan(self.exposed_s):
            communication = f"waited for communication {self.exposed_share:.1%} of the time, {self.hidden_share:.0%} of it hidden"
        parts.append(communication if self.link_share is None else f"{communication}, at {self.link_share:.0%} of the links' speed")
        return "; ".join(parts)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
