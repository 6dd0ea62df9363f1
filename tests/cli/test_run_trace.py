"""`shardnet run --trace`: a timeline of any program."""

import json
from pathlib import Path

import pytest

from shardnet import connect
from shardnet.errors import UsageError
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


def test_a_place_that_cannot_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = shardnet(tmp_path, "run", "--nproc", "1", "--trace", "folder", script(tmp_path, TRAINING))
    assert result.status == 1
    assert f"cannot write a trace to {tmp_path}/folder: Is a directory" in result.err


async def test_a_place_whose_folder_cannot_be_made_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"cannot write a trace to {tmp_path}/file/trace.json: File exists"):
        async with connect(trace=str(tmp_path / "file" / "trace.json")):
            raise AssertionError("the training begins")
