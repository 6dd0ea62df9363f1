"""`SHARDNET_NODE_ENGINE`: real processes, two for each of two nodes, with gloo inside and our mesh across."""

import json
from pathlib import Path

import pytest

from shardnet.testing.meeting import Meeting
from tests.cli.launched import Launched, script

WORKER = """
import json
import torch
import shardnet
from shardnet.testing import reference

async def main():
    async with shardnet.connect() as cluster:
        backend, rank = cluster.backend, cluster.rank
        inputs = [torch.arange(1_000_000, dtype=torch.float32) % 1000 + each for each in range(4)]
        print(json.dumps({
            "backend": type(backend).__name__,
            "nodes": backend.node_ranks,
            "all_gather": torch.equal(await backend.all_gather(inputs[rank]), reference.all_gather(inputs)[rank]),
            "reduce_scatter": torch.equal(await backend.reduce_scatter(inputs[rank]), reference.reduce_scatter(inputs)[rank]),
            "all_reduce": torch.equal(await backend.all_reduce(inputs[rank]), reference.all_reduce(inputs)[rank]),
            "all_to_all": torch.equal(await backend.all_to_all(inputs[rank]), reference.all_to_all(inputs)[rank]),
            "broadcast": torch.equal(await backend.broadcast(inputs[rank], 3), inputs[3]),
        }))

shardnet.run(main)
"""


def test_two_nodes_with_gloo_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_NODE_ENGINE", "gloo")
    folders = [tmp_path / name for name in ("left", "right")]
    for folder in folders:
        folder.mkdir()
    program = script(tmp_path, WORKER)
    with Meeting(4) as meeting:
        options = ("--nproc", "2", "--nnodes", "2", "--rendezvous", meeting.address)
        with (
            Launched(folders[0], "run", *options, "--node", "left", program) as left,
            Launched(folders[1], "run", *options, "--node", "right", program) as right,
        ):
            results = [left.finish(), right.finish()]
    assert [result.status for result in results] == [0, 0], results
    told = [json.loads(line.partition("] ")[2]) for result in results for line in result.out.splitlines()]
    right_ones = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), True)
    assert told == [{"backend": "HybridBackend", "nodes": [[0, 1], [2, 3]], **right_ones}] * 4
