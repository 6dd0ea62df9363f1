"""The training program, with the command lines that users have: real processes, on real sockets."""

import argparse
import json
import math
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardnet
from journal import Journal
from options import parse_options
from outputs import conclude, count_ranks, write_sample
from shardnet.elastic import State
from tests.training.programs import run_program
from tests.training.workers import ROOT, Nursery
from text import read_text
from train_lm import Trainer, learning_rate, main

PROGRAM = "workers/train_lm.py"
TINY = "--dim=32 --layers=2 --heads=2 --context=16 --bigrams=3 --warmup=0.2 --valid-every=8 --valid-windows=3 --sample-bytes=40 --lr=3e-3"


def train(nursery: Nursery, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Train on two ranks; return the report's data and what was printed. tests/cli/test_demo.py tests it through the launcher."""
    printed = run_program(nursery, ROOT, "run", "--nproc", "2", PROGRAM, "--", *TINY.split(), f"--out={out}", *options)
    return reported(out), printed


async def trainer_of(cluster: shardnet.Cluster, options: argparse.Namespace, book: Path) -> Trainer:
    return await Trainer.create(cluster, State(cluster), options, read_text(book, context=16), Journal(options.max_seconds))


def reported(out: Path) -> dict[str, Any]:
    page = re.search(r'id="run-data" type="application/json">(.*?)</script>', (out / "report.html").read_text(encoding="utf-8"), re.DOTALL)
    assert page
    data: dict[str, Any] = json.loads(page[1])
    return data


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 85 training windows: 21 global batches of four, and one sample that only one rank gets."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(b"".join(b"line %d of a short book\n" % number for number in range(100))[:1440])
    assert len(read_text(path, context=16).train) == 85
    return path


@pytest.mark.timeout(90)  # a cluster, on a machine that may be busy
@pytest.mark.blocks_loop  # it computes losses and batches on this loop, as the program does: the loop is the program's, not the network's
async def test_two_ranks_learn_what_one_learns(nursery: Nursery, tmp_path: Path, book: Path) -> None:
    """Same samples in the same order: the losses agree, also in the last step, where one of two ranks has no sample."""
    two, printed = train(nursery, tmp_path, f"--text={book}", "--epochs=1", "--batch=2")
    alone = parse_options([*TINY.split(), f"--text={book}", "--epochs=1", "--batch=4"])
    async with shardnet.connect() as cluster:
        one = await trainer_of(cluster, alone, book)
        await one.run()
        graphs: list[bool] = []
        one.model.fsdp.register_forward_hook(lambda module, inputs, logits: graphs.append(logits.requires_grad))
        await one.validate()
        assert graphs == [False], "validation must not build a graph: FSDP would wait for its backward"
        held = (await count_ranks(cluster, one.journal, one.model, one.optimizer))[0].held_bytes
        sample = await write_sample(cluster, one.model, one.config, alone)

    losses = [step["loss"] for step in two["steps"]]
    assert len(losses) == 22
    assert losses[0] == pytest.approx(math.log(256))
    assert losses == pytest.approx([step.loss for step in one.journal.steps], abs=1e-5)
    assert [v["loss"] for v in two["validations"]] == pytest.approx([v.loss for v in one.journal.validations], abs=1e-5)
    assert [step["gradient_norm"] for step in two["steps"]] == pytest.approx([step.gradient_norm for step in one.journal.steps], rel=1e-3)
    assert losses[-1] < losses[0] - 0.3
    assert two["sample"] == sample != ""

    assert [rank["rank"] for rank in two["ranks"]] == [0, 1]
    assert all(rank["held_bytes"] < 0.55 * held and rank["sent_bytes"] > 0 for rank in two["ranks"])
    assert "of the time spent waiting for communication" in printed
    assert "  | def main(" in printed
    assert re.search(r"^speed: 22 steps of 2 ranks, median .* tokens/s; waited for communication .* of it hidden$", printed, re.MULTILINE)
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    for rank in (0, 1):
        assert {"compute", "communication"} <= {event.get("cat") for event in events if event["pid"] == rank}


@pytest.mark.blocks_loop
async def test_bfloat16_learns_nearly_the_same(book: Path) -> None:
    async def losses(precision: str) -> list[float]:
        parsed = parse_options([*TINY.split(), f"--text={book}", "--steps=12", f"--precision={precision}"])
        async with shardnet.connect() as cluster:
            trainer = await trainer_of(cluster, parsed, book)
            await trainer.run()
            assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
            return [step.loss for step in trainer.journal.steps]

    exact, rounded = await losses("float32"), await losses("bfloat16")
    assert exact[-1] < exact[0] - 0.3
    assert rounded == pytest.approx(exact, rel=0.01)
    assert rounded != exact


@pytest.mark.timeout(90)
@pytest.mark.blocks_loop
async def test_two_ranks_learn_nearly_the_same_with_compression(nursery: Nursery, tmp_path: Path, book: Path) -> None:
    run, _ = train(nursery, tmp_path, f"--text={book}", "--epochs=1", "--batch=2", "--compress=int8")
    alone = parse_options([*TINY.split(), f"--text={book}", "--epochs=1", "--batch=4"])
    async with shardnet.connect() as cluster:
        one = await trainer_of(cluster, alone, book)
        await one.run()
    losses, exact = [step["loss"] for step in run["steps"]], [step.loss for step in one.journal.steps]
    assert losses[-1] < losses[0] - 0.3
    assert losses == pytest.approx(exact, rel=0.01)
    assert losses != pytest.approx(exact, abs=1e-5), "without compression they agree"
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    fifth = [event for event in events if event.get("cat") == "communication" and event["args"]["step"] == 5]
    sent = {op: sum(event["args"]["bytes"] for event in fifth if event["name"].startswith(op)) for op in ("all_gather", "all_to_all")}
    model_bytes = sum(parameter.nbytes for parameter in one.model.parameters())
    assert 0.25 * model_bytes < sent["all_to_all"] < 0.27 * model_bytes, "what two ranks send of a model's gradients"
    assert 0.25 * model_bytes < sent["all_gather"] < 2 * 0.27 * model_bytes, "some units are gathered twice"
    assert not any(event["name"].startswith("reduce_scatter") for event in events)


@pytest.mark.timeout(90)
def test_time_ends_a_run_on_all_ranks_at_the_same_step(nursery: Nursery, tmp_path: Path, book: Path) -> None:
    run, _ = train(nursery, tmp_path, f"--text={book}", "--steps=100000", "--max-seconds=0.5", "--batch=2")
    assert 1 <= len(run["steps"]) < 100_000
    assert run["config"]["max_seconds"] == "0.5"
    assert run["validations"][-1]["step"] == run["steps"][-1]["step"]


@pytest.mark.blocks_loop
async def test_a_file_ends_a_run(tmp_path: Path, book: Path) -> None:
    file = tmp_path / "stop"
    options = parse_options([*TINY.split(), f"--text={book}", "--steps=100000", f"--stop-file={file}"])
    async with shardnet.connect() as cluster:
        trainer = await trainer_of(cluster, options, book)
        await trainer.step(1)
        assert not trainer.told_to_stop
        file.touch()
        await trainer.run()
    assert [step.step for step in trainer.journal.steps] == [1, 2]
    assert trainer.journal.validations[-1].step == 2


@pytest.mark.blocks_loop
async def test_what_an_earlier_process_has_trained_is_not_time_of_this_one(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options([*TINY.split(), f"--text={book}", "--steps=12"])
    async with shardnet.connect() as cluster:
        trainer = await trainer_of(cluster, options, book)
        journal = Journal(None)
        before_s = time.perf_counter()
        journal.began(cluster, 1000, trainer.text, 12, 64, done=10, elapsed_s=3600.0)
        assert journal.duration_s <= time.perf_counter() - before_s, "this process's, from here on"
        trainer.journal = journal
        await conclude(cluster, journal, trainer.model, trainer.optimizer, trainer.config, options)
        assert re.search(r"^trained 0 steps in 0 s: \d", capsys.readouterr().out, re.MULTILINE), "all had been trained already"
        for step in (11, 12):
            await trainer.step(step)
        journal.validated(12, await trainer.validate())
        (rank,) = await count_ranks(cluster, journal, trainer.model, trainer.optimizer)
        await conclude(cluster, journal, trainer.model, trainer.optimizer, trainer.config, options)
    assert journal.steps[-1].seconds > 3600, "the training's"
    assert 0 < rank.duration_s < 60
    assert re.search(r"^trained 2 steps in \d s: ", capsys.readouterr().out, re.MULTILINE)


async def test_a_text_that_is_not_there_ends_the_program_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM, f"--text={tmp_path}/nowhere.txt"])
    with pytest.raises(SystemExit, match=f"train_lm: there is no file or folder {tmp_path}/nowhere.txt"):
        await main()


def options(**changes: float) -> argparse.Namespace:
    return argparse.Namespace(**({"lr": 1.0, "warmup": 0.1, "decay": 0.1, "max_seconds": None} | changes))


def test_the_rate_warms_up_and_decays_along_a_cosine() -> None:
    rates = [learning_rate(options(), step, 1000, 0.0) for step in range(1, 1001)]
    assert rates[0] == pytest.approx(0.01, rel=1e-4)
    assert rates[49] == pytest.approx(0.5, rel=0.01)
    assert rates[499] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(earlier < later for earlier, later in pairwise(rates[:100]))
    assert all(earlier > later for earlier, later in pairwise(rates[100:]))


def test_the_rate_decays_as_time_runs_out_when_that_is_sooner() -> None:
    def rate(step: int, elapsed_s: float) -> float:
        return learning_rate(options(max_seconds=60.0), step, 1000, elapsed_s)

    assert rate(20, 60.0) == pytest.approx(0.1)
    assert rate(20, 30.0) == pytest.approx(0.55)
    assert rate(500, 6.0) == pytest.approx(0.55)
    assert rate(20, 100.0) == pytest.approx(0.1), "time may run out within a step"


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0, 1), st.floats(0, 1), st.floats(0, 200))
def test_the_rate_stays_between_zero_and_the_peak(step: int, total: int, warmup: float, decay: float, elapsed_s: float) -> None:
    rate = learning_rate(options(warmup=warmup, decay=decay, max_seconds=100.0), min(step, total), total, elapsed_s)
    assert 0 <= rate <= 1 + 1e-12


def test_a_run_without_a_length_is_limited_in_time() -> None:
    assert parse_options([]).max_seconds < 180
    assert parse_options(["--steps", "7"]).max_seconds is None
    assert parse_options(["--epochs", "2"]).steps is None
    assert parse_options(["--max-seconds", "9"]).max_seconds == 9


@pytest.mark.parametrize(
    "wrong",
    [
        "--dim 30 --heads 4",
        "--steps 0",
        "--steps 3 --epochs 1",
        "--decay 2",
        "--warmup 30",
        "--bigrams -1",
        "--batch x",
        "--compress int4",
        "--compress int8 --strategy no_shard",
        "--compress bfloat16 --precision bfloat16",
        "--compress bfloat16-int8 --precision bfloat16",
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse_options(wrong.split())
    assert ending.value.code == 2
    assert "error: " in capsys.readouterr().err
