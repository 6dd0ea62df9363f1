"""`write_report`: a run as one HTML page that opens from disk and needs no network.

The page is `report_page/`: page.html with the style sheet, the scripts and the run's data written into it. Its
scripts put data into the page as text, never as markup, so `_embed` is the only place where data must be escaped.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from shardnet.telemetry import Span, Track
from shardnet.training.record import RunRecord, StepRecord
from shardnet.training.trace import RankSpans, lanes

MAX_TIMELINE_SPANS = 40_000  # per run, about 1.5 MB of page
MAX_STEPS = 4_000  # drawn in curves, about 0.5 MB of page; more than a screen has columns
_STRETCHES = 100  # of a longer run; the least and the greatest value of each are drawn in any case
_CURVES = ("loss", "tokens_per_s", "gradient_norm", "exposed_share")
_SCRIPTS = ("format.js", "chart.js", "timeline.js", "page.js")  # in this order
_DRAWN = (Track.COMPUTE, Track.EXPOSED, Track.COMMUNICATION)  # from top to bottom


def write_report(path: Path, run: RunRecord) -> None:
    """Write the page of a run; folders on the way are made. Open it in any browser."""
    page = files("shardnet.training") / "report_page"
    parts = {
        "TITLE": html.escape(run.title),
        "STYLE": (page / "style.css").read_text(encoding="utf-8"),
        "DATA": _embed(page_data(run)),
        "SCRIPT": "\n".join((page / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_fill((page / "page.html").read_text(encoding="utf-8"), parts), encoding="utf-8")


def page_data(run: RunRecord) -> dict[str, Any]:
    """What the page's scripts read, as a JSON object. Numbers that JSON cannot express (NaN) are None."""
    data = {
        "title": run.title,
        "started": run.started.isoformat(timespec="seconds"),
        "figures": _figures(run),
        "steps": [asdict(step) for step in _drawn(run.steps)],
        "validations": [asdict(validation) for validation in run.validations],
        "ranks": [asdict(rank) for rank in run.ranks],
        "timeline": _timeline(run.timeline),
        "prompt": run.prompt,
        "sample": run.sample,
        "config": {name: str(value) for name, value in run.config.items()},
        "versions": dict(run.versions),
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def _fill(template: str, parts: dict[str, str]) -> str:
    """Put each part where the template says «NAME»; «…» within a part is left alone."""
    pieces = template.split("«")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("»", 1)
        filled += parts[name], rest
    return "".join(filled)


def _embed(data: object) -> str:
    """JSON that is safe inside <script>: none of its characters can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _figures(run: RunRecord) -> list[dict[str, str]]:
    """The headline: label, value, and a note below it."""
    tokens_per_s = [step.tokens_per_s for step in run.steps]
    exposed = [rank.exposed_s / rank.duration_s for rank in run.ranks if rank.duration_s > 0]
    held = max((rank.held_bytes for rank in run.ranks), default=0)
    world_size = len(run.ranks)
    nodes = len({rank.node for rank in run.ranks})
    figures = [
        ("validation loss", _loss(run.validations[-1].loss if run.validations else math.nan), "nats per byte, on text held out"),
        ("training loss", _loss(run.steps[-1].loss if run.steps else math.nan), _from_to(run)),
        ("speed", f"{_median(tokens_per_s):,.0f}", "tokens per second, all ranks, median"),
        (
            "waiting",
            f"{100 * max(exposed, default=0.0):.1f} %",
            "of the time compute waited for communication, on the rank that waited most",
        ),
        ("steps", f"{len(run.steps):,}", f"in {_duration(run.duration_s)}"),
        ("world", _count(world_size, "rank"), f"on {_count(nodes, 'node')}"),
        ("parameters", f"{run.parameters / 1e6:.2f} M", "in the whole model"),
        ("held per rank", _mebibytes(held), f"of {_mebibytes(run.unsharded_bytes)} unsharded, optimizer included"),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in figures]


def _drawn(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps that curves are drawn of: all, or of a long run every so many, and those where a curve has a spike."""
    if len(steps) <= MAX_STEPS:
        return steps
    kept = {*range(0, len(steps), math.ceil(2 * len(steps) / MAX_STEPS)), len(steps) - 1}
    stretch = math.ceil(len(steps) / _STRETCHES)
    for first in range(0, len(steps), stretch):
        for name in _CURVES:
            values = [(getattr(step, name), index) for index, step in enumerate(steps[first : first + stretch], first)]
            if finite := [each for each in values if math.isfinite(each[0])]:
                kept |= {min(finite)[1], max(finite)[1]}
    return [steps[index] for index in sorted(kept)]


def _timeline(ranks: Sequence[RankSpans]) -> dict[str, Any]:
    """Lanes of spans as rows of numbers: [name, start µs, duration µs, bytes, step], names by their index."""
    spans = sorted((span for rank in ranks for span in rank.spans), key=lambda span: span.start_ns)[:MAX_TIMELINE_SPANS]
    origin_ns = spans[0].start_ns if spans else 0
    end_ns = spans[-1].start_ns if spans else 0
    names = {name: index for index, name in enumerate(sorted({span.name for span in spans}))}

    def row(span: Span) -> list[float]:
        start_us, duration_us = (span.start_ns - origin_ns) / 1000, (span.end_ns - span.start_ns) / 1000
        return [names[span.name], start_us, duration_us, span.bytes, span.step]

    def rank_lanes(rank: RankSpans) -> list[dict[str, Any]]:
        kept = [span for span in rank.spans if span.start_ns <= end_ns]
        by_track = ((track, lanes(span for span in kept if span.track is track)) for track in _DRAWN)
        return [{"track": str(track), "spans": [row(span) for span in lane]} for track, spread in by_track for lane in spread]

    return {
        "names": list(names),
        "ranks": [{"rank": rank.rank, "name": rank.name, "lanes": rank_lanes(rank)} for rank in ranks],
    }


def _from_to(run: RunRecord) -> str:
    return f"in the last step; {_loss(run.steps[0].loss)} in the first" if run.steps else "no step was taken"


def _loss(loss: float) -> str:
    return f"{loss:#.4g}" if math.isfinite(loss) else "–"


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
