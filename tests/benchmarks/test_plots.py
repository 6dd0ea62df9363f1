"""Plots of how cost grows: which there are, and what they show."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import growth
from benchmarks.report import write_json
from benchmarks.row import Row
from shardnet.config import KIB, MIB
from tests.benchmarks.rows import row

pytest.importorskip("matplotlib", reason="matplotlib is not installed: it belongs to the extra `bench`")

from benchmarks.plots import plots

ROOT = Path(__file__).resolve().parents[2]


def measured() -> list[Row]:
    """Rows like those that a run measures to show growth."""
    grown = partial(row, kind=growth.KIND)
    return [
        *(
            grown(op=op, ranks=ranks, bytes=size)
            for op in ("all_gather", "all_reduce")
            for ranks in (2, 4, 8)
            for size in growth.RANK_SIZES
        ),
        *(grown(op="all_reduce", bytes=size) for size in (64 * KIB, MIB, 4 * MIB)),
        *(grown(op="all_reduce", bytes=size, outstanding=count) for size in growth.OUTSTANDING_SIZES for count in (2, 4)),
        *(grown(op="train_step", peer=peer, layers=layers) for peer in ("fsdp2-gloo", "no communication") for layers in (2, 4)),
    ]


def drawn(rows: list[Row], directory: Path) -> list[Path]:
    """In a process of its own, as from the command line: matplotlib keeps the files of its fonts open."""
    write_json(rows, directory / "growth.json")
    command = [sys.executable, "-m", "benchmarks", "--markdown", str(directory / "growth.json"), "--results", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Path(line.removeprefix("Written: ")) for line in done.stdout.splitlines() if line.startswith("Written: ")]


def test_each_question_has_a_plot_and_the_same_rows_give_the_same_one(tmp_path: Path) -> None:
    (tables, *first), (_, *second) = (drawn(measured(), tmp_path / name) for name in ("one", "other"))
    assert "| 4 all_reduce at once | 2 | 64 KiB |  | 10 | gloo | 20 | 2.00x |" in tables.read_text().splitlines()
    assert [path.name for path in first] == ["ranks.svg", "size.svg", "outstanding.svg", "depth.svg"]
    for path, again in zip(first, second, strict=True):
        assert path.read_bytes() == again.read_bytes()
        words = " ".join(ElementTree.parse(path).getroot().itertext())
        assert "shardnet" in words
        assert ("gloo" in words) or ("no communication" in words)


def test_what_is_started_at_once_counts_by_the_piece() -> None:
    (plot,) = (plot for plot in plots(measured()) if plot.file == "outstanding.svg")
    small, _ = plot.lines
    assert {plot.x(row): row.ours_ms / plot.per(row) for row in small.rows} == pytest.approx({1: 10.0, 2: 5.0, 4: 2.5})


def test_what_was_not_measured_has_no_plot() -> None:
    assert plots([row(kind=growth.KIND)]) == []
    assert plots([row(), row(bytes=KIB)]) == []  # rows of another kind
    assert [plot.file for plot in plots([row(kind=growth.KIND, op="train_step", peer="fsdp2-gloo", layers=n) for n in (2, 4)])] == [
        "depth.svg"
    ]
