"""Rows on disk and as tables."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import PARTS
from benchmarks.plan import COLLECTIVES, Op
from benchmarks.report import markdown_report, read_json, text_report, write_json, write_tables
from benchmarks.row import Row
from benchmarks.tables import one_line, size
from benchmarks.targets import FSDP2, STEP_BYTES
from shardnet.config import KIB, MIB
from tests.benchmarks.rows import complete, row


def run() -> list[Row]:
    collectives = complete({Op.ALL_GATHER: 2.0, Op.REDUCE_SCATTER: 1.5, Op.ALL_REDUCE: 0.5})
    steps = [
        row(1.25, kind="step", op="train_step", bytes=4_000_000, peer="fsdp2-gloo", ours_loss=2.5, peer_loss=2.5),
        row(0.8, kind="step", op="train_step", bytes=4_000_000, peer="no communication", ours_loss=2.5),
    ]
    return [each.stamped("a machine", "2024-01-01T00:00:00+00:00") for each in (*collectives, *steps)]


def test_json_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "latest.json"
    write_json(run(), path)
    assert read_json(path) == run()


@pytest.mark.parametrize("text", ["no json", "{}, {}", '[{"kind": "collective"}]', '[{"who": 1}]', "[1]"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "latest.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json was not written by"):
        read_json(path)


def test_a_place_that_has_no_table_any_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_json([row(topology="netns-1gbit", transport="grpc", ranks=4, nodes=2)], path)
    with pytest.raises(ValueError, match=r"old\.json was not written by .*: nothing is measured over grpc on netns-1gbit"):
        read_json(path)


def test_text_tables_are_aligned_and_say_whether_targets_are_met() -> None:
    report = text_report(run())
    lines = report.splitlines()
    gather = next(line for line in lines if line.startswith("all_gather  "))
    assert gather.split() == ["all_gather", "1", "MiB", "10", "10-10", "20", "20-20", "2.00x", "256.00", "512.00"]
    assert (
        len({len(line) for line in lines if line.startswith(("all_gather  ", "reduce_scatter  ", "all_reduce  ")) and "MiB" in line}) == 1
    )
    verdicts = [line.split()[-1] for line in lines if line.endswith(("met", "missed"))]
    assert verdicts == ["met", "missed"]


def test_a_step_is_told_with_both_peers() -> None:
    lines = [line.split() for line in text_report(run()).splitlines()]
    assert ["shardnet", "2", "10", "10-10", "0.25", "2.5000"] in lines
    assert ["fsdp2-gloo", "2", "12.5", "12.5-12.5", "1.25x", "0.50", "2.5000"] in lines
    assert ["no", "communication", "2", "8", "8-8", "0.80x", "0.50"] in lines


def test_markdown_rows_have_as_many_cells_as_their_heads() -> None:
    report = markdown_report(run())
    tables = [block for block in report.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "**2 ranks on one machine" in report
    assert report.endswith("a machine; 2024-01-01T00:00:00+00:00")


def test_each_topology_has_a_table_that_says_where_the_ranks_were() -> None:
    rows = [
        row(topology="netns-1gbit", transport="hier", ranks=4, nodes=2),
        row(topology="netns", ranks=4, nodes=4),
        row(topology="netns", ranks=2, nodes=2),
        row(kind="step", op="train_step", topology="netns", nodes=2, bytes=4_000_000),
        row(),
    ]
    titles = [line for line in markdown_report(rows).splitlines() if line.startswith("**")]
    assert titles == [
        "**2 ranks on one machine: shardnet over gRPC and torch over gloo**",
        "**2 ranks each in a network namespace: shardnet over gRPC and torch over gloo**",
        "**4 ranks each in a network namespace: shardnet over gRPC and torch over gloo**",
        "**4 ranks on 2 nodes (network namespaces) with links of 1 Gbit/s: "
        "shardnet over gRPC, inside the nodes through shared memory, and torch over gloo**",
        "**Geometric means over 1, 16 and 64 MiB, of what is small over 1 and 64 KiB, of a unit over 16 and 64 MiB, and the targets**",
        "**A training step of a GPT with 1.0 M parameters, ranks each in a network namespace: shardnet over gRPC and FSDP2 over gloo**",
    ]


def test_a_limited_link_stands_beside_what_was_reached() -> None:
    """1 MiB x 3 in a ring of 4 on 2 nodes: half a MiB crosses, which takes the link 4.39 ms of the 10 that shardnet takes."""
    facts: dict[str, Any] = {"topology": "netns-1gbit", "transport": "hier", "ranks": 4, "nodes": 2, "moved_bytes": 3 * MIB}
    lines = [line.split() for line in text_report([row(**facts), row(kind="step", op="train_step", **facts)]).splitlines()]
    (gather,) = (line for line in lines if line[:1] == ["all_gather"] and "MiB" in line)
    assert gather[3:-2] == ["10", "10-10", "20", "20-20", "2.00x", "4.39", "44%"]
    small = text_report([row(bytes=KIB, **facts)])
    assert "link's bound" in small
    assert "4.39" not in small
    assert ["link's", "bound", "4", "4.39", "0.44x"] in lines
    assert "bound" not in text_report([row(), row(kind="step")])


def test_memory_has_a_bound_of_its_own() -> None:
    """A copy takes 4 ms of the 10 that shardnet takes."""
    lines = [line.split() for line in text_report([row(transport="shm", memcpy_ms=4.0, copies_ms=6.0)]).splitlines()]
    assert ["all_gather", "1", "MiB", "10", "10-10", "20", "20-20", "2.00x", "4", "40%", "6", "256.00", "512.00"] in lines


def test_beside_what_was_missed_stands_what_could_be_reached() -> None:
    text = text_report(complete(dict.fromkeys(COLLECTIVES, 4.0), transport="shm", copies_ms=9.0))
    assert re.search(r"all_gather .* 4.00x +5.00x +missed; at most 4.44x, if no rank waited for another", text)


def test_the_tables_of_a_run_are_a_page(tmp_path: Path) -> None:
    page = write_tables(run(), tmp_path)
    assert page.read_text().startswith("# Tables of one run\n\n")
    assert markdown_report(run()) in page.read_text()


def test_where_the_time_went_stands_in_a_table_of_its_own() -> None:
    explained = {part: float(number) for number, part in enumerate(PARTS)}
    lines = [line.split() for line in text_report([row(explained_ms=explained), row(op=Op.ALL_REDUCE)]).splitlines()]
    assert ["all_gather", "1", "MiB", str(sum(range(len(PARTS)))), *map(str, range(len(PARTS)))] in lines
    assert len([line for line in lines if line[:1] == ["all_reduce"]]) == 2  # in the tables of times and of targets; no --explain for it


def test_what_was_not_measured_has_no_table() -> None:
    report = text_report([row(bytes=KIB)])
    assert "Geometric" not in report
    assert "training" not in report


def test_sizes_as_people_write_them() -> None:
    assert [size(count) for count in (KIB, 64 * KIB, 64 * MIB, 3 * MIB // 2, 1000)] == ["1 KiB", "64 KiB", "64 MiB", "1536 KiB", "1000 B"]


def memory(peer_peak_bytes: int, size: int) -> Row:
    return row(kind="memory", op="train_step", peer=FSDP2, bytes=size, ours_peak_bytes=1_000_000_000, peer_peak_bytes=peer_peak_bytes)


def test_memory_is_judged_by_what_fsdp2_needs() -> None:
    text = text_report([memory(1_500_000_000, STEP_BYTES), memory(1_400_000_000, STEP_BYTES), memory(10**10, STEP_BYTES // 2)])
    assert [line.split()[1:] for line in text.splitlines() if line.startswith(FSDP2)] == [
        ["2", "100", "1500", "20", "1.50x", "1.43x", "met"],
        ["2", "100", "1400", "20", "1.40x", "1.43x", "missed"],
        ["2", "50", "10000", "20", "10.00x", "1.43x", *["too", "small", "a", "model", "to", "say"]],
    ]
    assert "one-node     2 ranks  grpc       peak memory" in one_line(memory(1_500_000_000, STEP_BYTES))


def test_several_at_once_are_told_apart_and_not_judged() -> None:
    text = text_report([row(memcpy_ms=5.0, transport="shm"), row(outstanding=8, transport="shm")])
    assert "8 all_gather at once" in text
    assert "only 1 of 9 cases measured" in text


def test_torchs_own_code_is_judged_by_its_mean_and_its_trainings() -> None:
    def interop(op: str, size: int, ratio: float, layers: int | None = None, free_ms: float | None = None) -> Row:
        return row(ratio, kind="interop", op=op, bytes=size, layers=layers, free_ms=free_ms)

    text = text_report([interop("all_reduce", 1024, 0.1), interop("all_reduce", MIB, 1.0), interop("all_gather", MIB, 4.0)])
    assert re.search(r"collectives from 1 MiB on, mean +2.00x +1.50x +met", text)
    text = text_report([interop("ddp_step", 10**8, 1.04, layers=8), interop("fsdp2_step", 10**8, 1.6, layers=8)])
    assert re.search(r"ddp_step .* 1.04x +1.50x +missed", text)
    assert re.search(r"fsdp2_step .* 1.60x +1.50x +met", text)
    assert "mean" not in text
    step = interop("ddp_step", 10**8, 1.04, layers=8)
    text = text_report([interop("ddp_step", 10**8, 1.04, layers=8, free_ms=step.peer_ms / 1.1)])
    assert re.search(r"ddp_step .* 1.04x +1.50x +missed; at most 1.10x, if moving data took no time", text)
