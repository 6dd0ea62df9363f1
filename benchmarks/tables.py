"""Rows as tables for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan import Transport
from benchmarks.row import Row, collectives, steps
from benchmarks.targets import Outcome, judge
from shardnet.cli.units import short_bytes
from shardnet.config import KIB, MIB

GIB = 1024 * MIB
_VIA: dict[str, str] = {Transport.GRPC: "over gRPC", Transport.SHM: "through shared memory"}


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Collectives by number of ranks, the targets, training steps; those for which there are rows."""
    measured = collectives(rows)
    by_ranks = [
        _collectives(ranks, transport, [row for row in measured if (row.ranks, row.transport) == (ranks, transport)])
        for ranks, transport in sorted({(row.ranks, row.transport) for row in measured})
    ]
    trained = steps(rows)
    by_size = [
        _steps(size, transport, [row for row in trained if (row.bytes, row.transport) == (size, transport)])
        for size, transport in sorted({(row.bytes, row.transport) for row in trained})
    ]
    return [table for table in (*by_ranks, _targets(judge(rows)), *by_size) if table.rows]


def one_line(row: Row) -> str:
    """A row while the rest is still being measured."""
    what = f"{row.op} {size(row.bytes)}" if row.kind == "collective" else row.op
    times = f"shardnet {_ms(row.ours_ms)} ms  {row.peer} {_ms(row.peer_ms)} ms"
    return f"{row.ranks} ranks  {row.transport:<4}  {what:<22}  {times}  {_ratio(row.ratio)}"


def _collectives(ranks: int, transport: str, rows: Sequence[Row]) -> Table:
    return Table(
        f"{ranks} ranks on one machine: shardnet {_VIA[transport]} and torch over gloo",
        ("collective", "size", "shardnet ms", "q1-q3", "gloo ms", "q1-q3", "ratio", "shardnet CPU s/GiB", "gloo CPU s/GiB"),
        tuple(
            (
                row.op,
                size(row.bytes),
                _ms(row.ours_ms),
                _spread(row.ours_q1_ms, row.ours_q3_ms),
                _ms(row.peer_ms),
                _spread(row.peer_q1_ms, row.peer_q3_ms),
                _ratio(row.ratio),
                _cpu_per_gib(row, row.ours_cpu_s),
                _cpu_per_gib(row, row.peer_cpu_s),
            )
            for row in rows
        ),
    )


def _targets(outcomes: Sequence[Outcome]) -> Table:
    return Table(
        "Geometric means over 1, 16 and 64 MiB, and the targets",
        ("collectives", "by", "ranks", "ratio", "target", ""),
        tuple(
            (
                outcome.target.name,
                str(outcome.target.transport),
                str(outcome.ranks),
                _ratio(outcome.mean),
                _ratio(outcome.target.ratio),
                {True: "met", False: "missed", None: f"only {outcome.cases} of {outcome.target.cases} cases measured"}[outcome.met],
            )
            for outcome in outcomes
        ),
    )


def _steps(parameter_bytes: int, transport: str, rows: Sequence[Row]) -> Table:
    ranks = sorted({row.ranks for row in rows})
    return Table(
        f"A training step of a GPT with {parameter_bytes / 4e6:.1f} M parameters, shardnet {_VIA[transport]}",
        ("engine", "ranks", "ms", "q1-q3", "ratio", "CPU s/step", "last loss"),
        tuple(line for count in ranks for line in _step_lines([row for row in rows if row.ranks == count])),
    )


def _step_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Ours once, then each of its peers."""
    one = rows[0]
    spread = _spread(one.ours_q1_ms, one.ours_q3_ms)
    lines: list[tuple[str, ...]] = [
        ("shardnet", str(one.ranks), _ms(one.ours_ms), spread, "", f"{one.ours_cpu_s:.2f}", _loss(one.ours_loss))
    ]
    for row in rows:
        spread = _spread(row.peer_q1_ms, row.peer_q3_ms)
        cpu_s = f"{row.peer_cpu_s:.2f}"
        lines.append((row.peer, str(row.ranks), _ms(row.peer_ms), spread, _ratio(row.ratio), cpu_s, _loss(row.peer_loss)))
    return lines


def _cpu_per_gib(row: Row, cpu_s: float) -> str:
    """Nothing for small messages: there it is the cost of a call that is measured, whatever its size."""
    return f"{cpu_s * GIB / row.moved_bytes:.2f}" if row.bytes >= MIB else ""


def _spread(low_ms: float, high_ms: float) -> str:
    return f"{_ms(low_ms)}-{_ms(high_ms)}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def size(count: int) -> str:
    """`1 KiB`, `64 MiB`: whole numbers where they are whole."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return short_bytes(count)


def _ms(value: float) -> str:
    """Three digits are more than a benchmark knows."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"
