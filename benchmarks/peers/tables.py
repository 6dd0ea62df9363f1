"""The results of the contest, as tables."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.peers.contest import Figures, Loss
from benchmarks.tables import Table

MB = 1e6
# Enough for the same arithmetic with another order of additions; a difference in the arithmetic itself exceeds it.
LOSS_TOLERANCE = 1e-3


def steps_table(rows: Sequence[tuple[Figures, Figures]]) -> Table:
    """A row per pair of shardnet and a peer. The ratio is the peer's median divided by shardnet's."""
    return Table(
        "A training step of 2 ranks",
        ("shardnet", "ms", "range", "MB sent", "peak MB", "peer", "ms", "range", "MB sent", "peak MB", "ratio", "losses"),
        tuple(_pair(*row) for row in rows),
    )


def losses_table(deaths: Mapping[str, Sequence[Loss]]) -> Table:
    """A row per engine."""
    rows = (
        (
            name,
            str(len(losses)),
            f"{1e3 * statistics.median(each.step_s for each in losses):.0f}",
            f"{statistics.median(each.resumed_s for each in losses):.2f}",
            _range([each.resumed_s for each in losses], 2),
            str(max(each.lost for each in losses)),
            str(max(each.vain for each in losses)),
        )
        for name, losses in deaths.items()
    )
    return Table(
        "kill -9 of one of 3 ranks, in the middle of a step",
        ("", "kills", "step before ms", "next step done after s", "range", "done steps lost", "steps in vain"),
        tuple(rows),
    )


def _pair(ours: Figures, theirs: Figures) -> tuple[str, ...]:
    ratio = statistics.median(theirs.steps_s) / statistics.median(ours.steps_s)
    difference = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    agreement = "equal" if difference <= LOSS_TOLERANCE else f"differ by {difference:.2g}"
    return (*_engine(ours), *_engine(theirs), f"{ratio:.2f}x", agreement)


def _engine(figures: Figures) -> tuple[str, ...]:
    milliseconds = [1e3 * step_s for step_s in figures.steps_s]
    return (
        figures.name,
        f"{statistics.median(milliseconds):.0f}",
        _range(milliseconds, 0),
        f"{statistics.median(figures.sent_bytes) / MB:.0f}",
        f"{figures.peak_bytes / MB:.0f}",
    )


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"
