"""Whole runs, as small as they can be: real processes, both engines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import __main__ as program
from benchmarks import launching
from benchmarks.journal import Journal
from benchmarks.nodes import NodeFailed, run_on_nodes
from benchmarks.options import parse_options
from benchmarks.parts import COLLECTIVES, HANDED_OVER, PARTS, REDUCING, SENDING, TRANSPORT
from benchmarks.plan import Session, Topology, to_json
from benchmarks.report import read_json
from benchmarks.row import Row
from shardnet.cli.protection import Protection
from shardnet.testing.namespaces import NamespacesUnavailable
from tests.benchmarks.rows import row
from tests.networks import nodes_or_skip
from tests.training.programs import run_program
from tests.training.workers import Nursery

ROOT = Path(__file__).resolve().parents[2]
TINY = "--quick --sizes 1KiB,16KiB --repeats 2 --steps 1 --layers 1 --dim 16 --heads 2 --context 16 --bigrams 16 --batch 1"
MEMORY = ("--topologies", "one-node", "--only", "memory", "--transports", "shm")
SMAPS = Path("/proc/self/smaps_rollup")


def measured(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run, which must succeed."""
    path = directory / "latest.json"
    command = [sys.executable, "-m", "benchmarks", "--json", str(path), *TINY.split(), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(title in done.stdout for title in (" ranks on ", "A training step of a GPT", "Peak memory"))
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


@pytest.fixture
def forked(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use forked workers that have torch imported already, instead of the launcher's; the rest of a run is unchanged."""

    def run_here(session: Session, directory: Path, _: Journal) -> int:
        run_program(nursery, ROOT, "run", "--nproc", str(session.ranks), "-m", launching.WORKER, to_json(session), str(directory))
        return 0

    monkeypatch.setattr(launching, "_run_here", run_here)


def measured_here(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """As `measured`, in this process."""
    path = directory / "latest.json"
    assert program.measure(parse_options(["--json", str(path), *TINY.split(), *arguments])) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def check_times(rows: list[dict[str, Any]]) -> None:
    for each in rows:
        assert each["ratio"] == pytest.approx(each["peer_ms"] / each["ours_ms"])
        assert each["ours_q1_ms"] <= each["ours_ms"] <= each["ours_q3_ms"]
        assert each["ours_cpu_s"] > 0
        assert each["ranks"] == 2


@pytest.mark.timeout(300)  # workers import torch; seconds, unless the machine is busy with other things
def test_collectives(tmp_path: Path) -> None:
    """With one transport; a test below checks without workers that a run goes through all of its sessions."""
    rows = measured(tmp_path, "--topologies", "one-node", "--only", "collectives", "--transports", "shm", "--explain")
    cases = [(op, size) for op in ("all_gather", "reduce_scatter", "all_reduce", "gather_on_node") for size in (1024, 16384)]
    assert [(row["transport"], row["op"], row["bytes"]) for row in rows] == [("shm", *case) for case in cases]
    check_times(rows)
    for each in rows:
        assert tuple(each["explained_ms"]) == PARTS
        assert all(each["explained_ms"][part] > 0 for part in (SENDING, TRANSPORT, COLLECTIVES))
        assert each["explained_ms"][HANDED_OVER] >= 0  # 0 if the caller does the work itself
        assert (each["explained_ms"][REDUCING] > 0) or each["op"] in ("all_gather", "gather_on_node")
        assert each["memcpy_ms"] > 0
        assert ("copies_ms" in each) == (each["op"] != "gather_on_node")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_training_steps_and_their_memory(tmp_path: Path) -> None:
    steps = measured_here(tmp_path, "--topologies", "one-node", "--only", "step", "--transports", "shm")
    assert [row["transport"] for row in steps] == ["shm"] * 3
    assert [row["peer"] for row in steps] == ["fsdp2-gloo", "no communication", "shardnet stepping in backward"]
    check_times(steps)
    if SMAPS.exists():
        (memory,) = measured_here(tmp_path, *MEMORY)
        check_memory(memory, least_bytes=50e6)  # they share most of their imports with the process that forked them
        assert memory["bytes"] == steps[0]["bytes"]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_torchs_own_code(tmp_path: Path) -> None:
    rows = measured_here(tmp_path, "--topologies", "one-node", "--only", "interop")
    cases = [(op, size) for size in (1024, 16384) for op in ("all_gather", "reduce_scatter", "all_reduce")]
    assert [(row["kind"], row["op"], row["bytes"]) for row in rows[:-2]] == [("interop", *case) for case in cases]
    assert [row["op"] for row in rows[-2:]] == ["ddp_step", "fsdp2_step"]
    assert {row["peer"] for row in rows} == {"gloo"}
    assert ["free_ms" in row for row in rows] == [False] * len(cases) + [True, True]
    check_times(rows)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel does not say what memory a process has for its part")
def test_the_memory_of_fresh_processes(tmp_path: Path) -> None:
    (memory,) = measured(tmp_path, *MEMORY)
    check_memory(memory, least_bytes=100e6)


def check_memory(row: dict[str, Any], *, least_bytes: float) -> None:
    """Check the memory of two processes that have imported torch."""
    for peak in ("ours_peak_bytes", "peer_peak_bytes"):
        assert 2 * least_bytes < row[peak] < 2 * 2e9
    assert row["ours_loss"] == pytest.approx(row["peer_loss"], abs=1e-3)


@pytest.mark.timeout(300)
def test_nodes_are_namespaces(tmp_path: Path) -> None:
    with nodes_or_skip(2, rate="1gbit"):
        pass
    rows = measured(tmp_path, "--topologies", "netns-1gbit", "--only", "collectives", "--ops", "all_reduce")
    assert [(row["topology"], row["nodes"], row["ranks"], row["bytes"]) for row in rows] == [
        ("netns-1gbit", 2, 4, 1024),
        ("netns-1gbit", 2, 4, 16384),
    ]


@pytest.mark.parametrize(("asked", "status"), [(None, 0), ((Topology.NETNS,), 1)])
def test_a_machine_without_namespaces_measures_the_rest(
    asked: tuple[Topology, ...] | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_session(session: Session) -> list[Row]:
        if session.topology is not Topology.ONE_NODE:
            raise NamespacesUnavailable("there is no 'ip'")
        return [row()]

    monkeypatch.setattr(program, "run_session", run_session)
    options = parse_options(["--json", str(tmp_path / "latest.json"), *TINY.split()])
    options.topologies = asked
    assert program.measure(options) == status
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"benchmarks: {name} is left out: there is no 'ip'" for name in ("netns", "netns-1gbit")]
    assert len(read_json(options.json)) == len([session for session in options.sessions if session.topology is Topology.ONE_NODE])
    assert "2 ranks on one machine" in out


def test_a_run_of_nothing_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(["--json", str(tmp_path / "latest.json")])
    options.sessions = []
    assert program.measure(options) == 0
    assert not options.json.exists()


def test_a_node_that_fails_ends_the_others_and_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with nodes_or_skip(2):
        pass
    before = psutil.Process().children(recursive=True)
    with pytest.raises(NodeFailed) as failure:
        run_on_nodes("no.such.module", (), nodes=2, ranks_per_node=1, rate=None, protection=Protection(insecure=True))
    assert failure.value.status == 1
    assert "no.such.module" in capfd.readouterr().err
    assert psutil.Process().children(recursive=True) == before
