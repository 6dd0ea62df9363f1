"""The file that a failed collective leaves behind."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardnet
from shardnet.config import Timeouts
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost, ProtocolError, UsageError
from shardnet.flight import Flight, Party
from shardnet.telemetry import Telemetry
from shardnet.topology import Member, Topology
from shardnet.training.black_box import BlackBox

TIMEOUTS = Timeouts.for_tests()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def fail_twice(cluster: shardnet.Cluster) -> None:
    """A collective that succeeds, one on which the two ranks disagree, and another of these."""
    backend = cluster.backend
    cluster.report(step=7)
    await backend.all_reduce(torch.ones(2), label="fine")
    for _ in range(2):
        with pytest.raises(CollectiveMismatch):
            await (backend.barrier() if cluster.rank else backend.all_gather(torch.ones(3)))


async def run_pair(address: str, job: str = "j", **settings: Any) -> None:
    async def member() -> None:
        async with shardnet.connect(
            rendezvous=address, job=job, min_world_size=2, max_world_size=2, timeouts=TIMEOUTS, **settings
        ) as cluster:
            await fail_twice(cluster)

    await asyncio.gather(member(), member())


async def test_the_first_failure_is_written_down_by_every_rank(meeting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "new" / "records"
    await run_pair(meeting, job="a/job", flight=str(folder))
    assert names(folder) == [f"flight-a_job-epoch1-rank{rank}.jsonl" for rank in (0, 1)]
    for rank, op in enumerate(("all_gather", "barrier")):
        path = folder / f"flight-a_job-epoch1-rank{rank}.jsonl"
        head, fine, failed = lines(path)
        assert {key: head[key] for key in ("job", "epoch", "rank", "world_size", "step", "failed", "error")} == {
            "job": "a/job", "epoch": 1, "rank": rank, "world_size": 2, "step": 7, "failed": f"{op} #1", "error": "CollectiveMismatch",
        }  # fmt: skip
        assert (fine["op"], fine["label"], fine["sequence"], fine["state"], fine["error"]) == ("all_reduce", "fine", 0, "done", "")
        assert (fine["group"], fine["members"], fine["step"], fine["bytes_sent"]) == ("0x0", [0, 1], 7, 8)
        assert fine["begun_at"] <= fine["entered_at"] <= fine["ended_at"] <= failed["ended_at"] <= head["at"]
        assert (failed["op"], failed["state"], failed["error"]) == (op, "failed", "CollectiveMismatch")
        (told,) = (record for record in caplog.records if str(path) in record.getMessage())
        assert told.levelno == logging.ERROR
        assert told.getMessage() == f"{head['message']}; this rank's last collectives are in {path}"


async def test_a_file_of_another_run_is_never_overwritten(meeting: str, tmp_path: Path) -> None:
    theirs = tmp_path / "flight-j-epoch1-rank0.jsonl"
    theirs.write_text("theirs")
    await run_pair(meeting, flight=str(tmp_path))
    assert theirs.read_text() == "theirs"
    assert names(tmp_path) == [f"flight-j-epoch1-{name}.jsonl" for name in ("rank0.2", "rank0", "rank1")]


async def test_without_a_folder_nothing_is_written(meeting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await run_pair(meeting)
    assert names(tmp_path) == []


async def test_what_cannot_be_written_is_a_line_in_the_log_and_the_error_stays(
    meeting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "records"

    async def member() -> None:
        async with shardnet.connect(
            rendezvous=meeting, min_world_size=2, max_world_size=2, timeouts=TIMEOUTS, flight=str(folder)
        ) as cluster:
            await cluster.backend.barrier()
            if cluster.rank == 0:
                folder.rmdir()
            await cluster.backend.barrier()
            await fail_twice(cluster)

    await asyncio.gather(member(), member())
    said = [record.getMessage() for record in caplog.records if record.name == "shardnet.training.black_box"]
    assert len(said) == 2
    assert all("cannot be written to" in each and each.endswith("No such file or directory") for each in said)


async def test_a_folder_that_cannot_be_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot keep flight records in .*/file: File exists; choose another folder \(SHARDNET_FLIGHT\)"):
        async with shardnet.connect(flight=str(tmp_path / "file")):
            pass


def failing(telemetry: Telemetry, epoch: int, error: BaseException) -> None:
    flight = telemetry.flights.begin(Flight(Party(epoch, 0, (0,)), 0, "barrier", "", 0, 1))
    telemetry.flights.end(flight, 2, error)


def topology() -> Topology:
    return Topology(epoch=1, rank=0, members=(Member(0, 0, 0, "127.0.0.1:1", "n", "i"),))


def test_each_epoch_has_its_file(tmp_path: Path) -> None:
    telemetry = Telemetry()
    box = BlackBox(tmp_path, "j", telemetry, topology)
    for epoch in (1, 1, 2):
        failing(telemetry, epoch, PeerLost("gone", 1))
    box.close()
    assert {path.name: len(lines(path)) for path in tmp_path.iterdir()} == {
        "flight-j-epoch1-rank0.jsonl": 2,
        "flight-j-epoch2-rank0.jsonl": 4,
    }


@pytest.mark.parametrize("error", [PeerLost("", 1), CollectiveTimeout(""), CollectiveMismatch(""), CollectiveError(""), ProtocolError("")])
def test_errors_of_the_cluster_are_written_down(tmp_path: Path, error: Exception) -> None:
    telemetry = Telemetry()
    box = BlackBox(tmp_path, "j", telemetry, topology)
    failing(telemetry, 1, error)
    box.close()
    assert names(tmp_path) == ["flight-j-epoch1-rank0.jsonl"]


def test_what_the_program_has_ended_itself_is_not(tmp_path: Path) -> None:
    telemetry = Telemetry()
    box = BlackBox(tmp_path, "j" * 256, telemetry, topology)
    failing(telemetry, 1, ClosedError())
    failing(telemetry, 1, ValueError())
    assert names(tmp_path) == []
    failing(telemetry, 1, PeerLost("", 1))
    box.close()
    assert [len(path.name) for path in tmp_path.iterdir()] == [len("flight--epoch1-rank0.jsonl") + 100]
