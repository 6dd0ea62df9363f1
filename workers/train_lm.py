"""Train a byte-level GPT on text, sharded over the workers of a cluster.

    shardnet run --nproc 2 workers/train_lm.py -- --max-seconds 60

    shardnet run --nproc 3 --min-workers 2 --restarts 1 workers/train_lm.py

Every rank has the whole text and, in each step, sequences of its own. With the second command line the training goes on when a
worker dies, at the step after the last committed one. `--help` lists the options; model, text and
report have files of their own beside this one.
"""

import argparse
import math
import sys
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import shardnet
from gpt import GPT, Bigrams, Block, GPTConfig, parameter_count
from journal import Journal
from options import COMPRESSIONS, PRECISIONS, parse_options
from outputs import conclude, prepare
from shardnet import elastic
from shardnet.backend.gather import gather_json
from shardnet.performance import PerformanceRecorder, cluster_figures
from shardnet.training.sampler import ShardedSampler
from text import Text, TextError, read_text


async def main() -> None:
    options = parse_options()
    try:
        text = read_text(options.text, options.context)
    except TextError as error:
        sys.exit(f"train_lm: {error}")
    prepare(options)
    journal = Journal(options.max_seconds)
    settings: dict[str, Any] = {"track": str(options.out)} if options.out else {}
    await elastic.run(
        lambda cluster, state: train(cluster, state, options, text, journal),
        every=options.commit_every,
        checkpoints=options.checkpoints,
        save_every=options.save_every,
        **settings,
    )


async def train(cluster: shardnet.Cluster, state: elastic.State, options: argparse.Namespace, text: Text, journal: Journal) -> None:
    """Train with the present workers, from the step that the state has reached."""
    cluster.telemetry.tracing |= options.out is not None
    await check_same_text(cluster, text)
    trainer = await Trainer.create(cluster, state, options, text, journal)
    await trainer.run()
    await state.save()
    figures = await cluster_figures(cluster.backend, trainer.recorder.figures())
    journal.say(f"speed: {figures}")
    if trainer.commits_s:
        copies = f"{state.nbytes / 2**20:.0f} MiB of copies on each rank"
        journal.say(f"commits: median {1e3 * median(trainer.commits_s):.1f} ms, {copies}")
    await conclude(cluster, journal, trainer.model, trainer.optimizer, trainer.config, options)


class Trainer:
    """One rank's part in the training while no worker comes or goes. Every coroutine here is a collective."""

    def __init__(
        self,
        cluster: shardnet.Cluster,
        state: elastic.State,
        options: argparse.Namespace,
        text: Text,
        config: GPTConfig,
        model: shardnet.AsyncFSDP,
        journal: Journal,
    ) -> None:
        self.cluster = cluster
        self.state = state
        self.options = options
        self.text = text
        self.config = config
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
        )
        self.sampler = self._sampler(len(text.train), seed=options.seed)
        self.journal = journal
        self.total_steps = 0
        self.recorder: PerformanceRecorder  # from `create`, since it measures the network first
        self.commits_s: list[float] = []  # how long each commit took
        self.elapsed_s = 0.0  # the mean over ranks, so that all ranks decide alike; 0 until the first step is done
        self.told_to_stop = False  # whether any rank was told to

    @classmethod
    async def create(
        cls, cluster: shardnet.Cluster, state: elastic.State, options: argparse.Namespace, text: Text, journal: Journal
    ) -> "Trainer":
        torch.manual_seed(options.seed)
        config = GPTConfig(options.dim, options.layers, options.heads, options.context, options.bigrams)
        whole = GPT(config)
        parameters = parameter_count(whole)
        device = device_of(cluster, options)
        strategy = shardnet.ShardingStrategy(options.strategy)
        model = await cluster.shard(
            whole if options.cpu_offload else whole.to(device),
            units=(Block, Bigrams),
            strategy=strategy,
            prefetch=options.prefetch,
            mixed_precision=PRECISIONS[options.precision],
            compression=COMPRESSIONS[options.compress],
            cpu_offload=options.cpu_offload,
            device=device if options.cpu_offload else None,
        )
        trainer = cls(cluster, state, options, text, config, model, journal)
        trainer.recorder = await cluster.record(model, trainer.optimizer)
        await state.resume(model, trainer.optimizer, position=0, elapsed_s=0.0)
        trainer.total_steps = options.steps or state.step + trainer.steps_left(options.epochs)
        tokens_per_step = trainer.sampler.global_batch * options.context
        journal.began(cluster, parameters, text, trainer.total_steps, tokens_per_step, done=state.step, elapsed_s=state["elapsed_s"])
        return trainer

    def steps_left(self, epochs: int) -> int:
        """How many steps the rest of `epochs` passes over the text takes."""
        position: int = self.state["position"]
        passes, seen = divmod(position, self.sampler.samples)
        left = math.ceil((self.sampler.samples - seen) / self.sampler.global_batch)
        return left + (epochs - passes - 1) * self.sampler.steps_per_epoch

    async def run(self) -> None:
        """All steps, with validation in between and at the end."""
        for step in range(self.state.step + 1, self.total_steps + 1):
            await self.step(step)
            last = step == self.total_steps or self.told_to_stop or self.elapsed_s >= (self.options.max_seconds or math.inf)
            if last or step % self.options.valid_every == 0:
                with self.recorder.paused():
                    self.journal.validated(step, await self.validate())
            if last:
                return

    async def step(self, step: int) -> None:
        """One optimizer step on the whole cluster's batch."""
        self.journal.begin_step(step)
        rate = learning_rate(self.options, step, self.total_steps, self.elapsed_s)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        share = self.sampler.at(self.state["position"])
        inputs, targets = self._on_device(self.text.train.batch(share.indices))
        self.recorder.count(samples=share.samples, tokens=share.samples * self.options.context)
        loss = share.weight * cross_entropy(await self.model(inputs), targets)
        told_to_stop = self.options.stop_file is not None and self.options.stop_file.exists()
        progress = torch.tensor([loss.item(), self.journal.elapsed_s, told_to_stop], dtype=torch.float64)
        agreed = self.cluster.backend.all_reduce(
            progress, shardnet.ReduceOp.MEAN, label="progress"
        ).quietly()  # if a rank is lost meanwhile, backward raises that
        await self.model.backward(loss)
        norm = await self.model.clip_grad_norm(self.options.clip)
        with self.cluster.telemetry.span("optimizer"):
            await self.model.step(self.optimizer)
        self.optimizer.zero_grad()
        mean_loss, self.elapsed_s, tellers = (await agreed).tolist()
        self.told_to_stop = tellers > 0
        if not math.isfinite(mean_loss):
            sys.exit(f"train_lm: the loss of step {step} is {mean_loss}; try a lower --lr than {self.options.lr}")
        self.journal.end_step(
            step, loss=mean_loss, tokens=share.batch * self.options.context, learning_rate=rate, gradient_norm=float(norm)
        )
        await self.state.commit(step, position=self.state["position"] + share.batch, elapsed_s=self.elapsed_s)
        if self.cluster.elastic and step % self.options.commit_every == 0:
            self.commits_s.append(self.state.commit_s)

    async def validate(self) -> float:
        """Mean loss on windows of the held-out text; each rank evaluates a part of them."""
        windows = self.text.valid.thinned(self.options.valid_windows)
        total = 0.0
        samples = 0
        for share in self._sampler(len(windows)).epoch(0):
            inputs, targets = self._on_device(self.text.valid.batch([windows[index] for index in share.indices]))
            with torch.no_grad():  # not as a decorator, which would end before the coroutine begins
                loss = cross_entropy(await self.model(inputs), targets)
            total += share.samples * loss.item()
            samples += share.samples
        return await self.cluster.mean(total / max(samples, 1), weight=samples)

    def _on_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        device = device_of(self.cluster, self.options)
        return batch[0].to(device), batch[1].to(device)

    def _sampler(self, samples: int, seed: int | None = None) -> ShardedSampler:
        return ShardedSampler(samples, batch=self.options.batch, rank=self.cluster.rank, world_size=self.cluster.world_size, seed=seed)


def device_of(cluster: shardnet.Cluster, options: argparse.Namespace) -> torch.device:
    """Where this worker computes."""
    return torch.device("cuda", cluster.local_rank % torch.cuda.device_count()) if options.device == "cuda" else torch.device("cpu")


def learning_rate(options: argparse.Namespace, step: int, total_steps: int, elapsed_s: float) -> float:
    """Linear warm-up, then a cosine down to `decay` of the peak, by the used share of steps or of allowed seconds, whichever is larger."""
    used = max(step / total_steps, elapsed_s / options.max_seconds if options.max_seconds else 0.0)
    cosine = 0.5 * (1 + math.cos(math.pi * min(used, 1.0)))
    warm = min(1.0, used / options.warmup) if options.warmup else 1.0
    return float(options.lr * warm * (options.decay + (1 - options.decay) * cosine))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all positions, in nats per byte: B×T×256 and B×T → 0-dim."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


async def check_same_text(cluster: shardnet.Cluster, text: Text) -> None:
    """End the program if ranks have different texts: they would share out different samples, and nobody would notice."""
    fingerprints = await gather_json(cluster.backend, text.fingerprint, "text")
    strangers = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if strangers:
        sys.exit(
            f"train_lm: rank 0 and rank {strangers[0]} read different texts (another Python version, perhaps); give the same --text to all"
        )


if __name__ == "__main__":
    shardnet.run(main)
