"""One whole run, as small as it can be: real processes, both engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = "--quick --sizes 1KiB,16KiB --repeats 2 --steps 1 --layers 1 --dim 16 --heads 2 --context 16 --bigrams 16 --batch 1"


@pytest.mark.timeout(180)  # eight workers import torch; seconds, unless the machine is busy with other things
def test_a_run_measures_everything_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    command = [sys.executable, "-m", "benchmarks", "--json", str(path), *TINY.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())
    collectives = [(row["transport"], row["op"], row["bytes"]) for row in rows if row["kind"] == "collective"]
    cases = [(op, size) for op in ("all_gather", "reduce_scatter", "all_reduce") for size in (1024, 16384)]
    assert collectives == [(transport, *case) for transport in ("grpc", "shm") for case in cases]
    assert [row["peer"] for row in rows if row["kind"] == "step"] == ["fsdp2-gloo", "no communication"] * 2
    for row in rows:
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"])
        assert row["ours_q1_ms"] <= row["ours_ms"] <= row["ours_q3_ms"]
        assert row["ours_cpu_s"] > 0
        assert row["ranks"] == 2
    assert "A training step of a GPT" in run.stdout
