"""Where a training's metrics go."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardnet import Cluster, connect
from shardnet.config import Timeouts
from shardnet.errors import UsageError
from shardnet.telemetry import Progress
from shardnet.training.tracking import Record, Tracker
from shardnet.training.tracking.json_lines import NAME, JsonLines
from shardnet.training.tracking.record import OWN
from tests.training.workers import rendezvous


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


async def test_what_rank_0_reports_is_there_for_everybody(tmp_path: Path) -> None:
    async def train(address: str) -> None:
        settings: dict[str, Any] = {"min_world_size": 2, "max_world_size": 2, "track": str(tmp_path), "timeouts": Timeouts.for_tests()}
        async with connect(rendezvous=address, **settings) as cluster:
            for step in (1, 2):
                cluster.report(step=step, loss=cluster.rank + 1 / step, tokens_per_s=8.0, metrics={"learning_rate": 0.1 * step})
            await cluster.backend.barrier()

    with rendezvous() as address:
        await asyncio.gather(train(address), train(address))
    first, second = lines(tmp_path)
    assert isinstance(first.pop("time"), float)
    assert first == {"step": 1, "epoch": 1, "world_size": 2, "loss": 1.0, "tokens_per_s": 8.0, "learning_rate": 0.1}
    assert (second["step"], second["loss"]) == (2, 0.5)
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 0.5)]
    assert [value for _, value in scalars(tmp_path, "learning_rate")] == pytest.approx([0.1, 0.2])


async def test_tensors_of_one_element_are_numbers(tmp_path: Path) -> None:
    async with connect(track=str(tmp_path)) as cluster:
        loss = torch.ones(2, requires_grad=True).sum()  # still with its graph, of which torch would warn
        cluster.report(step=1, loss=loss, metrics={"norm": torch.tensor([2.0])})
        assert await cluster.mean(loss) == 2.0
    (line,) = lines(tmp_path)
    assert (line["loss"], line["norm"]) == (2.0, 2.0)


async def test_steps_of_other_libraries_are_whole_numbers() -> None:
    seen: list[int] = []
    async with connect() as cluster:
        cluster.on_metrics(lambda step, _: seen.append(step))
        cluster.report(step=np.int64(1), total_steps=np.int64(3), loss=1.0)  # of which JSON would make no line
        cluster.report(step=torch.tensor(2), loss=1.0)
        for step in ("3", 2.5, None):
            with pytest.raises(UsageError, match="step must be a whole number, got"):
                cluster.report(step=step, loss=1.0)  # type: ignore[arg-type]  # what is under test
    assert seen == [1, 2]
    assert all(type(step) is int for step in seen)


async def test_what_is_given_is_recorded_even_where_it_is_zero(tmp_path: Path) -> None:
    async with connect(track=str(tmp_path)) as cluster:
        cluster.report(step=1, loss=0.0, tokens_per_s=0.0, exposed_share=0.0)
        assert cluster.telemetry.progress == Progress(1, 0, 0.0)
        cluster.report(step=2)
    first, second = [{name: value for name, value in line.items() if name not in OWN} for line in lines(tmp_path)]
    assert first == {"loss": 0.0, "tokens_per_s": 0.0, "exposed_share": 0.0}
    assert second == {"loss": None}
    assert scalars(tmp_path, "exposed_share") == [(1, 0.0)]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"name": "gpt"}, "metric 'name' must be one number, got str"),
        ({"norm": torch.ones(2)}, "metric 'norm' must be one number, got Tensor"),
        ({"step": 3.0}, "a metric cannot be called 'step'"),
    ],
)
async def test_what_is_no_metric_is_said_where_it_is_reported(tmp_path: Path, metrics: dict[str, Any], words: str) -> None:
    async with connect(track=str(tmp_path)) as cluster:
        with pytest.raises(UsageError, match=words):
            cluster.report(step=1, metrics=metrics)
        cluster.report(step=2, loss=1.0)
    assert [line["step"] for line in lines(tmp_path)] == [2]


async def test_nothing_is_written_where_nobody_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with connect() as cluster:
        cluster.report(step=1, loss=1.0)
    assert names(tmp_path) == []


async def test_functions_of_the_users(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    def broken(step: int, _: object) -> None:
        raise ZeroDivisionError(f"at step {step}")

    async with connect() as cluster:
        cluster.on_metrics(broken)
        cluster.on_metrics(lambda step, metrics: seen.append((step, dict(metrics))))
        for step in (1, 2):
            cluster.report(step=step, loss=0.5)
    assert seen == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert (
        caplog.text.count("metrics no longer go to the function test_functions_of_the_users.<locals>.broken: ZeroDivisionError: at step 1")
        == 1
    )


def take(tracker: Tracker, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        tracker.take(Record(step, 1000.0 + step, 1, 1, {"loss": loss}))
    tracker.close()


def test_a_run_that_goes_back_takes_the_place_of_the_later_steps(tmp_path: Path) -> None:
    take(Tracker(tmp_path), 1, 2, 3)
    take(Tracker(tmp_path), 2, loss=5.0)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (2, 5.0)]
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 5.0)]


@pytest.mark.parametrize("back", [2, 4])
def test_steps_that_a_process_repeats_take_the_place_of_the_old_ones(back: int, tmp_path: Path) -> None:
    """As after a reform, which goes back to the last commit."""
    tracker = Tracker(tmp_path)
    for epoch, steps in ((1, range(1, 5)), (2, range(back, 6))):
        for step in steps:
            tracker.take(Record(step, 1000.0, epoch, 1, {"loss": 10.0 * epoch + step}))
    tracker.close()
    kept = [(step, 10.0 + step) for step in range(1, back)]
    assert scalars(tmp_path, "loss") == [*kept, *((step, 20.0 + step) for step in range(back, 6))]


def test_a_second_report_of_a_step_adds_to_the_first(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    for name in ("loss", "validation loss"):
        tracker.take(Record(3, 1000.0, 1, 1, {name: 1.0}))
    tracker.close()
    assert scalars(tmp_path, "loss") == scalars(tmp_path, "validation loss") == [(3, 1.0)]


def test_a_line_that_was_not_written_to_its_end_is_dropped(tmp_path: Path) -> None:
    """For example because the disk was full; complete lines stay."""
    path = tmp_path / NAME
    for found, kept in (('{"step": 1}\n{"step": 2, "w', '{"step": 1}\n'), ('{"st', ""), ('{"step": 1}\n', '{"step": 1}\n'), ("", "")):
        path.write_text(found)
        lines = JsonLines(tmp_path)
        lines.write(Record(3, 0.0, 1, 1, {}))
        lines.close()
        text = path.read_text()
        assert text.startswith(kept)
        assert json.loads(text.removeprefix(kept))["step"] == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_no_number_is_null(loss: float, tmp_path: Path) -> None:
    take(Tracker(tmp_path), 1, loss=loss)
    assert lines(tmp_path)[0]["loss"] is None


def test_what_cannot_be_written_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    take(Tracker(tmp_path / "file"), 1, 2)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[0] for line in said] == [
        f"metrics no longer go to {tmp_path}/file/{NAME}",
        f"metrics no longer go to TensorBoard's events in {tmp_path}/file",
    ]


def test_a_full_disk_is_told_in_two_lines(tmp_path: Path) -> None:
    """And not by a traceback of somebody else's thread. Here no file can have more than 4 KiB."""
    program = f"""
import resource
from pathlib import Path
from shardnet.training.tracking.record import Record
from shardnet.training.tracking.tracker import Tracker
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
tracker = Tracker(Path({str(tmp_path)!r}))
for step in range(200):
    tracker.take(Record(step, 1000.0, 1, 1, {{"loss": 1.0}}))
tracker.close()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 2, done.stderr
    assert all(line.startswith("metrics no longer go to ") and "File too large" in line for line in said)


def test_any_number_of_files_is_read_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    for epoch in range(120):
        tracker.take(Record(1, 1000.0, epoch, 1, {"loss": float(epoch)}))
    tracker.close()
    assert scalars(tmp_path, "loss") == [(1, 119.0)]


async def test_a_cluster_that_somebody_else_has_formed_reports_to_nobody() -> None:
    async with connect() as cluster:
        Cluster(cluster.backend, cluster.topology).report(step=1)
