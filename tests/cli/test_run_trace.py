"""`shardnet run --trace`: a timeline of whatever program was run."""

import json
from pathlib import Path

import pytest

from tests.cli.launched import script, shardnet

TRAINING = """
import torch, shardnet

async def main():
    async with shardnet.connect() as cluster:
        await cluster.backend.all_reduce(torch.ones(3), label="a number")

shardnet.run(main)
"""


def test_any_program_leaves_a_timeline_of_all_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "new folder" / "trace.json"
    result = shardnet(tmp_path, "run", "--nproc", "2", "--trace", str(trace), script(tmp_path, TRAINING))
    assert (result.status, result.err) == (0, f"shardnet: timeline of all ranks, for https://ui.perfetto.dev: {trace}\n")
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans if span["name"] == "all_reduce #0 of a number"} == {0, 1}


@pytest.mark.parametrize("place", ["file/trace.json", "folder"])
def test_a_place_that_cannot_be_written_is_told_before_the_training(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    result = shardnet(tmp_path, "run", "--nproc", "1", "--trace", place, script(tmp_path, TRAINING))
    assert result.status == 1
    assert f"cannot write a trace to {tmp_path}/{place}" in result.err
