"""What a run leaves behind: a sample of what the model writes, a report page and a trace."""

import argparse
import asyncio
import platform
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from gpt import GPT, GPTConfig
from journal import Journal
from shardnet import AsyncFSDP, Cluster
from shardnet.backend.gather import gather_json
from shardnet.fsdp import memory_report
from shardnet.training.record import RankRecord, RunRecord, StepRecord, Validation
from shardnet.training.report import write_report
from shardnet.training.trace import RankSpans, gather_spans, write_trace

TIMELINE_STEPS = 4  # drawn in the report
REPORT = "report.html"
TRACE = "trace.json"


def prepare(options: argparse.Namespace) -> None:
    """Make the output folder now: at the end of a long run it is too late to learn that it cannot be made."""
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"train_lm: cannot write to {options.out}: {error.strerror}")


async def conclude(
    cluster: Cluster, journal: Journal, model: AsyncFSDP, optimizer: torch.optim.Optimizer, config: GPTConfig, options: argparse.Namespace
) -> None:
    """Say how the run went and write what was asked for. A collective; call it right after the last step."""
    duration_s = journal.duration_s
    ranks = await count_ranks(cluster, journal, model, optimizer)
    spans = await gather_spans(cluster.backend, cluster.topology.me.address)
    sample = await write_sample(cluster, model, config, options)
    if cluster.rank != 0:
        return
    run = RunRecord(
        title="A byte-level GPT, trained on " + (options.text.name if options.text else "Python's standard library"),
        started=journal.started,
        duration_s=duration_s,
        parameters=journal.parameters,
        unsharded_bytes=sum(rank.held_bytes for rank in ranks),
        steps=journal.steps,
        validations=journal.validations,
        ranks=ranks,
        timeline=typical_steps(journal.steps, journal.validations, spans),
        prompt=options.prompt,
        sample=sample,
        config={name: value for name, value in vars(options).items() if value is not None},
        versions=versions(),
    )
    print_summary(run)
    if options.out:
        await asyncio.to_thread(write_files, run, spans, options.out)


async def count_ranks(cluster: Cluster, journal: Journal, model: AsyncFSDP, optimizer: torch.optim.Optimizer) -> list[RankRecord]:
    """The totals of every rank. A collective."""
    mine = {
        "address": cluster.topology.me.address,
        "node": cluster.topology.me.node,
        "held_bytes": memory_report(model.fsdp, optimizer).persistent,
        "sent_bytes": cluster.telemetry.bytes_sent,
        "received_bytes": cluster.telemetry.bytes_received,
        "exposed_s": journal.exposed_s,
        "duration_s": journal.duration_s,
    }
    return [RankRecord(rank=rank, **totals) for rank, totals in enumerate(await gather_json(cluster.backend, mine, "totals"))]


async def write_sample(cluster: Cluster, model: AsyncFSDP, config: GPTConfig, options: argparse.Namespace) -> str:
    """What the model writes after the prompt; "" on all ranks but the first. A collective."""
    state = await model.full_state_dict(rank0_only=True)
    if cluster.rank != 0 or not options.sample_bytes:
        return ""
    whole = GPT(config)  # on the CPU, wherever the parameters are
    whole.load_state_dict(state)
    prompt: bytes = options.prompt.encode()
    written = await asyncio.to_thread(whole.generate, prompt, options.sample_bytes, seed=options.seed)
    return written[len(prompt) :].decode(errors="replace")


def typical_steps(steps: Sequence[StepRecord], validations: Sequence[Validation], spans: Sequence[RankSpans]) -> list[RankSpans]:
    """The spans of a few steps from the middle of the run; steps without a validation, if there are enough."""
    validated = {validation.step for validation in validations}
    later = [record.step for record in steps[len(steps) // 2 :]]
    quiet = [step for step in later if step not in validated]
    chosen = (quiet if len(quiet) >= TIMELINE_STEPS else later)[:TIMELINE_STEPS]
    return [rank.during(chosen) for rank in spans]


def print_summary(run: RunRecord) -> None:
    if run.sample:
        print(f"what it writes:\n{textwrap.indent(run.prompt + run.sample, '  | ', lambda line: True)}")
    waiting = max(rank.exposed_s / rank.duration_s for rank in run.ranks)
    loss = f"validation loss {run.validations[-1].loss:.3f}, " if run.validations else ""  # none if it resumes what was trained already
    print(
        f"trained {len(run.steps):,} steps in {run.duration_s:.0f} s: {loss}"
        f"{100 * waiting:.1f} % of the time spent waiting for communication, "
        f"{run.ranks[0].held_bytes / 2**20:.0f} MiB held by each rank",
        flush=True,
    )


def write_files(run: RunRecord, spans: Sequence[RankSpans], folder: Path) -> None:
    """Write the report page and the trace."""
    write_trace(folder / TRACE, spans)
    print(f"timeline for https://ui.perfetto.dev: {folder / TRACE}", flush=True)
    write_report(folder / REPORT, run)
    print(f"report: {folder / REPORT}", flush=True)


def versions() -> dict[str, str]:
    """Versions of everything that influences a run's numbers and speed."""
    packages = ("shardnet", "torch", "grpcio", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version(), "platform": platform.platform()}
