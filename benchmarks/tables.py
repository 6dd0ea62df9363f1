"""Rows as tables for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.parts import PARTS
from benchmarks.plan import Topology, Transport
from benchmarks.row import Row, collectives, growths, interops, memories, steps
from benchmarks.targets import (
    INTEROP_RATIO,
    MEMORY_RATIO,
    OURS,
    SIZES,
    STEP_BYTES,
    Outcome,
    StepOutcome,
    geometric_mean,
    judge,
    judge_steps,
)
from shardnet.cli.units import short_bytes
from shardnet.config import KIB, MIB

GIB = 1024 * MIB
_WHERE = {
    Topology.ONE_NODE: "on one machine",
    Topology.NETNS: "each in a network namespace",
    Topology.NETNS_1GBIT: "on 2 nodes (network namespaces) with links of 1 Gbit/s",
}
_VIA = {
    (Topology.ONE_NODE, Transport.GRPC): "over gRPC",
    (Topology.ONE_NODE, Transport.MTLS): "over gRPC with mutual TLS",
    (Topology.ONE_NODE, Transport.SHM): "through shared memory",
    (Topology.NETNS, Transport.GRPC): "over gRPC",
    (Topology.NETNS, Transport.MTLS): "over gRPC with mutual TLS",
    (Topology.NETNS_1GBIT, Transport.HIER): "over gRPC, inside the nodes through shared memory,",
}
_LINK_HEAD = ("link's bound ms", "reached")
_VERDICT_HEAD = ("where", "by", "ranks", "ratio", "target", "")
_MEMORY_HEAD = ("memcpy ms", "reached", "copies alone ms")
Place = tuple[Topology, int, Transport]  # each place gets its own table; the number is that of ranks or of bytes


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Collectives by number of ranks, the targets, training steps and more: the tables for which there are rows."""
    by_ranks = [_collectives(place, group) for place, group in _grouped(collectives(rows), lambda row: row.ranks)]
    why = [_explained(place, group) for place, group in _grouped(collectives(rows), lambda row: row.ranks)]
    by_size = [_steps(place, group) for place, group in _grouped(steps(rows), lambda row: row.bytes)]
    all_of_them = (*by_ranks, *why, _targets(judge(rows)), *by_size, _step_targets(judge_steps(rows)), _memory(memories(rows)))
    all_of_them += tuple(_interop(ranks, interops(rows)) for ranks in sorted({row.ranks for row in interops(rows)}))
    all_of_them += (_growth(growths(rows)),)
    return [table for table in all_of_them if table.rows]


def _grouped(rows: Sequence[Row], number: Callable[[Row], int]) -> list[tuple[Place, list[Row]]]:
    """Sorted by topology in the order of declaration, then number, then transport."""
    groups: dict[Place, list[Row]] = {}
    for row in rows:
        groups.setdefault((Topology(row.topology), number(row), Transport(row.transport)), []).append(row)
    order = list(Topology)
    return sorted(groups.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:]))


def one_line(row: Row) -> str:
    """A row as it is printed while the rest is still being measured."""
    what = row.op if row.op.endswith("step") else f"{_op(row)} {size(row.bytes)}"
    if row.ours_peak_bytes is not None and row.peer_peak_bytes is not None:
        peaks = f"shardnet {_mb(row.ours_peak_bytes)} MB  {row.peer} {_mb(row.peer_peak_bytes)} MB"
        return f"{row.topology:<11}  {row.ranks} ranks  {row.transport:<9}  {'peak memory':<22}  {peaks}"
    times = f"shardnet {_ms(row.ours_ms)} ms  {row.peer} {_ms(row.peer_ms)} ms"
    return f"{row.topology:<11}  {row.ranks} ranks  {row.transport:<9}  {what:<22}  {times}  {_ratio(row.ratio)}"


def _collectives(place: Place, rows: Sequence[Row]) -> Table:
    topology, ranks, transport = place
    engines = ("shardnet ms", "q1-q3", "gloo ms", "q1-q3", "ratio")
    costs = ("shardnet CPU s/GiB", "gloo CPU s/GiB")
    bound = _bound_head(rows[0])
    return Table(
        f"{ranks} ranks {_WHERE[topology]}: shardnet {_VIA[topology, transport]} and torch over gloo",
        ("collective", "size", *engines, *bound, *costs),
        tuple(
            (
                _op(row),
                size(row.bytes),
                _ms(row.ours_ms),
                _spread(row.ours_q1_ms, row.ours_q3_ms),
                _ms(row.peer_ms),
                _spread(row.peer_q1_ms, row.peer_q3_ms),
                _ratio(row.ratio),
                *_of_bound(row, bound),
                _cpu_per_gib(row, row.ours_cpu_s),
                _cpu_per_gib(row, row.peer_cpu_s),
            )
            for row in rows
        ),
    )


def _op(row: Row) -> str:
    return row.op if row.outstanding == 1 else f"{row.outstanding} {row.op} at once"


def _bound_head(row: Row) -> tuple[str, ...]:
    if row.link_bound_ms is not None:
        return _LINK_HEAD
    return _MEMORY_HEAD if row.memcpy_ms is not None else ()


def _of_bound(row: Row, head: Sequence[str]) -> tuple[str, ...]:
    """The least time that the links or memory allow, and what part of shardnet's time that is. Empty for small messages: their time
    depends on neither."""
    bound_ms = row.memcpy_ms if row.link_bound_ms is None else row.link_bound_ms
    if bound_ms is None or row.bytes < MIB:
        return ("",) * len(head)
    reached = _ms(bound_ms), f"{bound_ms / row.ours_ms:.0%}"
    return reached if head == _LINK_HEAD else (*reached, "" if row.copies_ms is None else _ms(row.copies_ms))


def _explained(place: Place, rows: Sequence[Row]) -> Table:
    """Where the time went, in ms, for rows that say so."""
    topology, ranks, transport = place
    return Table(
        f"Where the time goes, in ms, as the mean of all ranks and with a profiler on: {ranks} ranks {_WHERE[topology]}, "
        f"shardnet {_VIA[topology, transport].rstrip(',')}",
        ("collective", "size", "all", *PARTS),
        tuple(
            (row.op, size(row.bytes), _ms(sum(row.explained_ms.values())), *(_ms(row.explained_ms[part]) for part in PARTS))
            for row in rows
            if row.explained_ms is not None
        ),
    )


def _targets(outcomes: Sequence[Outcome]) -> Table:
    return Table(
        "Geometric means over 1, 16 and 64 MiB, of what is small over 1 and 64 KiB, of a unit over 16 and 64 MiB, and the targets",
        ("collectives", *_VERDICT_HEAD),
        tuple(_verdict(each, each.mean, f"only {each.cases} of {each.target.cases} cases measured") for each in outcomes),
    )


def _verdict(outcome: Outcome | StepOutcome, ratio: float, why_none: str) -> tuple[str, ...]:
    """One line of a table of targets. Without a verdict it says `why_none`; a missed target comes with the ratio that could be reached."""
    target, limit = outcome.target, outcome.limit
    missed = "missed" if limit is None else f"missed; at most {_ratio(limit.ratio)}, {limit.if_}"
    verdict = {True: "met", False: missed, None: why_none}[outcome.met]
    return target.name, str(target.topology), str(target.transport), str(outcome.ranks), _ratio(ratio), _ratio(target.ratio), verdict


def _steps(place: Place, rows: Sequence[Row]) -> Table:
    topology, parameter_bytes, transport = place
    ranks = sorted({row.ranks for row in rows})
    return Table(
        f"A training step of a GPT with {parameter_bytes / 4e6:.1f} M parameters, ranks {_WHERE[topology]}: "
        f"shardnet {_VIA[topology, transport]} and FSDP2 over gloo",
        ("engine", "ranks", "ms", "q1-q3", "ratio", "CPU s/step", "last loss"),
        tuple(line for count in ranks for line in _step_lines([row for row in rows if row.ranks == count])),
    )


def _step_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Ours once, then each of its peers, then what the links allow."""
    one = rows[0]
    ranks, spread = str(one.ranks), _spread(one.ours_q1_ms, one.ours_q3_ms)
    lines: list[tuple[str, ...]] = [("shardnet", ranks, _ms(one.ours_ms), spread, "", f"{one.ours_cpu_s:.2f}", _loss(one.ours_loss))]
    for row in rows:
        spread = _spread(row.peer_q1_ms, row.peer_q3_ms)
        cpu_s = f"{row.peer_cpu_s:.2f}"
        lines.append((row.peer, ranks, _ms(row.peer_ms), spread, _ratio(row.ratio), cpu_s, _loss(row.peer_loss)))
    if one.link_bound_ms is not None:
        lines.append(("link's bound", ranks, _ms(one.link_bound_ms), "", _ratio(one.link_bound_ms / one.ours_ms), "", ""))
    return lines


def _step_targets(outcomes: Sequence[StepOutcome]) -> Table:
    return Table(
        "Training steps, and the targets",
        ("times of", *_VERDICT_HEAD),
        tuple(_verdict(each, each.ratio, "too small a model to say") for each in outcomes),
    )


def _memory(rows: Sequence[Row]) -> Table:
    """The target is relative to the peer's memory: at most 0.7 of it."""
    return Table(
        "Peak memory of all ranks together in such a training, each engine in processes of its own",
        ("engine", "ranks", "parameters MB", "peak MB", "step ms", "ratio", "target", ""),
        tuple(line for row in rows for line in _memory_lines(row)),
    )


def _memory_lines(row: Row) -> list[tuple[str, ...]]:
    ours, theirs = row.ours_peak_bytes or 0, row.peer_peak_bytes or 0
    facts = str(row.ranks), _mb(row.bytes)
    verdict = ("met" if theirs / ours >= MEMORY_RATIO else "missed") if row.bytes >= STEP_BYTES else "too small a model to say"
    return [
        (OURS, *facts, _mb(ours), _ms(row.ours_ms), "", "", ""),
        (row.peer, *facts, _mb(theirs), _ms(row.peer_ms), _ratio(theirs / ours), _ratio(MEMORY_RATIO), verdict),
    ]


def _growth(rows: Sequence[Row]) -> Table:
    """The numbers of the plots."""
    return Table(
        "How cost grows, through shared memory on one machine",
        ("what", "ranks", "size", "blocks", "shardnet ms", "peer", "peer ms", "ratio"),
        tuple(
            (
                *(_op(row), str(row.ranks), size(row.bytes), "" if row.layers is None else str(row.layers)),
                *(_ms(row.ours_ms), row.peer, _ms(row.peer_ms), _ratio(row.ratio)),
            )
            for row in rows
        ),
    )


def _interop(ranks: int, rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if row.ranks == ranks]
    lines = [
        (
            *(row.op, size(row.bytes), _ms(row.ours_ms), _spread(row.ours_q1_ms, row.ours_q3_ms)),
            *(_ms(row.peer_ms), _spread(row.peer_q1_ms, row.peer_q3_ms), _ratio(row.ratio)),
            *(_interop_verdict(row.ratio, row) if row.layers is not None else ("", "")),
        )
        for row in rows
    ]
    collective = [row.ratio for row in rows if row.layers is None and row.bytes in SIZES]
    mean = geometric_mean(collective) if collective else 0.0
    return Table(
        f"torch's own code on {ranks} ranks of one machine, over the backend shardnet and over gloo",
        ("what", "size", "shardnet ms", "q1-q3", "gloo ms", "q1-q3", "ratio", "target", ""),
        (*lines, *([("collectives from 1 MiB on, mean", *[""] * 5, _ratio(mean), *_interop_verdict(mean))] if collective else [])),
    )


def _interop_verdict(ratio: float, step: Row | None = None) -> tuple[str, str]:
    if ratio >= INTEROP_RATIO:
        return _ratio(INTEROP_RATIO), "met"
    limit = "" if step is None or step.free_ms is None else f"; at most {_ratio(step.peer_ms / step.free_ms)}, if moving data took no time"
    return _ratio(INTEROP_RATIO), f"missed{limit}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f}"


def _cpu_per_gib(row: Row, cpu_s: float) -> str:
    """Empty for small messages: they measure the cost of a call, whatever its size."""
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
    """Three digits are more than a benchmark can tell."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"
