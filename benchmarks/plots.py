"""Plots of how cost grows: shardnet and its peer, on logarithmic axes, where a straight line is a power."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import growth
from benchmarks.row import Row, growths
from benchmarks.tables import size
from benchmarks.targets import ALONE, FSDP2, OURS

_COLOURS = ("#1f6feb", "#8250df")


@dataclass(frozen=True, slots=True)
class Line:
    """Rows that differ only in the value on one axis."""

    name: str
    rows: list[Row]
    colour: str


@dataclass(frozen=True, slots=True)
class Plot:
    file: str
    title: str
    x_label: str
    y_label: str
    x: Callable[[Row], float]
    lines: list[Line]
    per: Callable[[Row], float] = lambda _: 1.0  # what the time is divided by


def draw_all(rows: Sequence[Row], directory: Path) -> Iterator[Path]:
    """Write one SVG per question for which there are rows; equal rows give an equal file."""
    for plot in plots(rows):
        path = directory / plot.file
        with mpl.rc_context({"svg.hashsalt": "shardnet", "svg.fonttype": "none", "font.family": "sans-serif"}):
            _figure(plot).savefig(path, metadata={"Date": None}, bbox_inches="tight")
        yield path


def plots(rows: Sequence[Row]) -> list[Plot]:
    rows = growths(rows)
    single = [row for row in rows if row.layers is None and row.outstanding == 1]
    by_ranks = [
        Line(f"{op}, {size(count)}", [row for row in single if row.op == op and row.bytes == count], colour)
        for op, colour in zip(("all_gather", "all_reduce"), _COLOURS, strict=True)
        for count in growth.RANK_SIZES
    ]
    by_size = [Line("all_reduce, 2 ranks", [row for row in single if row.op == "all_reduce" and row.ranks == 2], _COLOURS[0])]
    at_once = [
        Line(f"all_reduce of {size(count)}, 2 ranks", [row for row in _outstanding(rows) if row.bytes == count], colour)
        for count, colour in zip(growth.OUTSTANDING_SIZES, _COLOURS, strict=True)
    ]
    depths = [row for row in rows if row.layers is not None]
    by_depth = [Line("", [row for row in depths if row.peer == peer], colour) for peer, colour in _peers(depths)]
    found = [
        Plot("ranks.svg", "Ranks of one machine with 2 cores", "ranks", "ms", lambda row: row.ranks, by_ranks),
        Plot("size.svg", "Size of the tensor", "KiB", "ms", lambda row: row.bytes / 1024, by_size),
        Plot("outstanding.svg", "Collectives started at once", "at once", "ms each", _at_once, at_once, _at_once),
        Plot("depth.svg", "Depth of the model, 2 ranks", "blocks", "ms a step", lambda row: row.layers or 0, by_depth),
    ]
    return [plot for plot in found if any(len(line.rows) > 1 for line in plot.lines)]


def _outstanding(rows: Sequence[Row]) -> list[Row]:
    """Rows with the sizes and the number of ranks of that question, one collective at a time included."""
    return [row for row in rows if row.op == "all_reduce" and row.ranks == 2 and row.bytes in growth.OUTSTANDING_SIZES]


def _at_once(row: Row) -> float:
    return row.outstanding


def _peers(rows: Sequence[Row]) -> list[tuple[str, str]]:
    measured = {row.peer for row in rows}
    return [(peer, colour) for peer, colour in ((FSDP2, _COLOURS[1]), (ALONE, "#57606a")) if peer in measured]


def _figure(plot: Plot) -> Figure:
    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    for line in plot.lines:
        _draw(axes, plot, line)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label, xscale="log", yscale="log")
    ticks = sorted({plot.x(row) for line in plot.lines for row in line.rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="major", color="#d0d7de", linewidth=0.6)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw(axes: Axes, plot: Plot, line: Line) -> None:
    rows = sorted({plot.x(row): row for row in line.rows}.items())
    xs, peer = [x for x, _ in rows], rows[0][1].peer
    ours_ms = [row.ours_ms / plot.per(row) for _, row in rows]
    peer_ms = [row.peer_ms / plot.per(row) for _, row in rows]
    if _label(OURS, line) not in axes.get_legend_handles_labels()[1]:  # shardnet's line is drawn once even if it has two peers
        axes.plot(xs, ours_ms, color=line.colour, marker="o", markersize=4, label=_label(OURS, line))
    axes.plot(xs, peer_ms, color=line.colour, marker="s", markersize=3, linestyle="--", alpha=0.65, label=_label(peer, line))


def _label(engine: str, line: Line) -> str:
    return f"{engine}: {line.name}" if line.name else engine
