"""torch.distributed over shardnet: its results, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardnet.credentials.token import new_token
from tests.training.workers import Nursery


def run(nursery: Nursery, folder: Path, program: str, world_size: int, *environment: str) -> str:
    return nursery.call("tests.interop.programs:main", str(folder), str(world_size), program, *environment, within_s=55.0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", ["reductions", "movements", "conveniences"])
def test_collectives(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    run(nursery, tmp_path, program, world_size)


@pytest.mark.parametrize(
    ("program", "world_size"), [("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("hsdp", 4), ("zero", 2), ("joined", 2), ("tensors_of_a_mesh", 2)]
)
def test_trainings(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    """Parameters are within 1e-7 of those of one process that has seen all batches."""
    run(nursery, tmp_path, program, world_size)


@pytest.mark.parametrize("routing", ["rank-order", "auto"])
def test_gradients_are_those_of_a_loop(nursery: Nursery, tmp_path: Path, routing: str) -> None:
    run(nursery, tmp_path, "ddp_in_rank_order", 4, f"SHARDNET_ROUTING={routing}")


def test_bits_are_those_of_the_run_before(nursery: Nursery, tmp_path: Path) -> None:
    seen = set()
    for attempt in ("one", "two"):
        folder = tmp_path / attempt
        folder.mkdir()
        run(nursery, folder, "alike", 3)
        seen |= {path.read_bytes() for path in folder.glob("bits of *")}
    assert len(seen) == 1


def errors(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.name.split()[-1]): json.loads(path.read_text()) for path in folder.glob("error of *")}


def test_ranks_that_call_different_collectives_hear_of_each_other(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "mismatch", 2)
    found = errors(tmp_path)
    assert {each["type"] for each in found.values()} == {"CollectiveMismatch"}
    for each in found.values():
        assert "all_reduce" in each["text"]
        assert "all_gather" in each["text"]


def test_a_mean_of_whole_numbers_is_not_taken_for_a_sum(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "mismatched_means", 2)
    found = errors(tmp_path)
    assert found.keys() == {0, 1}
    assert all(each["type"] == "CollectiveMismatch" and "of truncated mean" in each["text"] for each in found.values()), found


def test_ranks_that_name_different_roots_hear_of_each_other(nursery: Nursery, tmp_path: Path) -> None:
    """Errors use torch's names for these collectives, and the ranks of the world."""
    run(nursery, tmp_path, "mismatched_roots", 3)
    for number, named in enumerate(
        [("gather to 0", "gather to 2"), ("gather to 0",), ("scatter from 0", "scatter from 2"), ("reduce to 2",)]
    ):
        found = errors(tmp_path / str(number))
        assert found.keys() == {0, 2}, (number, found)
        assert {each["type"] for each in found.values()} == {"CollectiveMismatch"}, (number, found)
        assert all(name in each["text"] for each in found.values() for name in named), (number, found)


def test_a_death_surfaces_in_backward_and_the_others_go_on(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "lost_in_backward", 3)
    died = float((tmp_path / "died").read_text())
    found = errors(tmp_path)
    assert found.keys() == {0, 1}
    for each in found.values():
        assert "PeerLost" in each["text"] or each["type"] == "PeerLost"
        assert "rank 2" in each["text"]
        assert "all_reduce" in each["text"]
        assert each["at"] - died < 5.0, "a closed connection is noticed at once, on a machine as busy as this may be"


def test_several_worlds_one_after_the_other_in_one_store(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "worlds_in_one_store", 2)


def test_under_a_token_everything_is_encrypted(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "protected", 2, f"SHARDNET_TOKEN={new_token()}")


def test_torch_knows_the_name_without_being_told(tmp_path: Path) -> None:
    """It has neither imported gRPC for that, nor told gRPC to be quiet."""
    text = """
import os, sys, torch
loaded = [name for name in ("grpc", "shardnet.backend") if name in sys.modules]
print(torch.distributed.Backend.SHARDNET, loaded, os.environ.get("GRPC_VERBOSITY"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}  # the tests' own process has set it
    said = subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=50
    )
    assert said.stdout.strip() == "shardnet [] None"
