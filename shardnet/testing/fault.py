"""`Fault`: one thing that should go wrong."""

from dataclasses import dataclass, field
from enum import StrEnum

from shardnet.errors import UsageError
from shardnet.telemetry import Pass
from shardnet.testing.conditions import Conditions
from shardnet.testing.harm import Kind

STEP = "step"
_MOMENTS = (STEP, *(kind.value for kind in Pass))  # at which the training thread itself can be held up
_OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "recv", "reduce_scatter", "send")  # of a Backend


class Action(StrEnum):
    """What is done. The worker does the first three to itself; the test process does the others."""

    KILL = "kill"
    FREEZE = "freeze"
    DELAY = "delay"
    JOIN = "join"
    LINK = "worsen the link to"
    CUT = "cut off"
    HOLD = "hold what is sent to"
    HARM = "harm what is sent to"


ON_LINKS = (Action.LINK, Action.CUT, Action.HOLD, Action.HARM)


@dataclass(frozen=True, slots=True)
class Fault:
    """Made by `Faults`, which documents each action.

    rank     the rank that it concerns, as numbered in the first epoch of the workers that started together
    at_step  how many steps the rank has done by then, as reported to `Cluster.report` and `State.commit`
    after    from that step on, the event at whose end it happens: "step", "forward", "backward", or a backend operation ("all_gather")
    """

    action: Action
    rank: int
    at_step: int
    after: str = STEP
    seconds: float = 0.0
    kind: Kind = Kind.FLIP
    least_bytes: int = 1
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        if self.rank < 0 or self.at_step < 0 or self.seconds < 0:
            raise UsageError(f"rank, step and seconds of a fault must not be negative: {self}")
        if self.after not in (*_MOMENTS, *_OPERATIONS):
            raise UsageError(f"after must be one of {', '.join(map(repr, (*_MOMENTS, *_OPERATIONS)))}, got {self.after!r}")
        if self.after not in _MOMENTS and self.action not in (Action.KILL, Action.FREEZE):
            raise UsageError(
                f"only kill and freeze can come after {self.after!r}, which ends on a thread that must not be held up; "
                f"choose one of {', '.join(map(repr, _MOMENTS))}"
            )

    def __str__(self) -> str:
        moment = f"at step {self.at_step}" + ("" if self.after == STEP else f" after {self.after}")
        length = f" for {self.seconds:g} s" if self.seconds else f" ({self.kind.name})" if self.action is Action.HARM else ""
        if self.action is Action.JOIN:
            return f"another worker joins when rank {self.rank} is {moment}"
        return f"{self.action} rank {self.rank}{length} {moment}"
