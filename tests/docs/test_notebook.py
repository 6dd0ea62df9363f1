"""The notebook runs from its first cell to its last, and draws what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="what runs notebooks is not installed: pip install 'shardnet[notebook]'")
pytest.importorskip("nbclient", reason="what runs notebooks is not installed: pip install 'shardnet[notebook]'")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "four-ranks.ipynb"
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.timeout(120)  # two fresh interpreters
def test_it_runs_and_draws(tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(executed)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outputs = [output for cell in nbformat.read(executed, as_version=4).cells for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} == {"execute_result", "stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "every rank has seen the same: True" in said
    assert [path.name for path in tmp_path.iterdir()] == [executed.name]


def test_it_is_kept_without_what_it_has_printed() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
