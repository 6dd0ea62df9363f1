"""`Finding`: the result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"  # it works, but is slower or weaker than it need be, or will soon not work
    PROBLEM = "problem"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found and how serious it is, and, unless it is ok, what to do."""

    topic: str
    level: Level
    what: str
    advice: str = ""


def ok(topic: str, what: str) -> Finding:
    return Finding(topic, Level.OK, what)


def warning(topic: str, what: str, advice: str) -> Finding:
    return Finding(topic, Level.WARNING, what, advice)


def problem(topic: str, what: str, advice: str = "") -> Finding:
    """Without an advice if `what` contains it, as errors of ours do."""
    return Finding(topic, Level.PROBLEM, what, advice)
