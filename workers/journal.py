"""`Journal`: follows a training run and reports on it as it goes."""

import math
import time
from datetime import datetime
from statistics import median

from shardnet import Cluster
from shardnet.training.record import StepRecord, Validation
from text import Text

RECENT = 20  # steps over which the speed is taken


class Journal:
    """One run as one rank saw it. Rank 0 is the one that prints."""

    def __init__(self, max_seconds: float | None) -> None:
        self._cluster: Cluster  # set by `began`
        self._total_steps = 0
        self._max_seconds = max_seconds
        self.parameters = 0
        self.started = datetime.now().astimezone()
        self._start_s = self._begun_s = self._last_s = time.perf_counter()
        self._exposed_before_ns = self._last_exposed_ns = 0
        self.steps: list[StepRecord] = []
        self.validations: list[Validation] = []

    @property
    def elapsed_s(self) -> float:
        """How long the training has taken, with what other processes have done of it before."""
        return time.perf_counter() - self._start_s

    @property
    def duration_s(self) -> float:
        """How long this process has taken part in it: the time that `steps` and `exposed_s` are of."""
        return time.perf_counter() - self._begun_s

    @property
    def exposed_s(self) -> float:
        """Time in which this rank's compute waited for communication."""
        return (self._cluster.telemetry.exposed_ns - self._exposed_before_ns) / 1e9

    def say(self, text: str) -> None:
        if self._cluster.rank == 0:
            print(text, flush=True)

    def began(
        self, cluster: Cluster, parameters: int, text: Text, total_steps: int, tokens_per_step: int, *, done: int, elapsed_s: float
    ) -> None:
        """The training begins, or goes on after step `done`, which it reached in `elapsed_s`. It forgets records of later steps."""
        if not hasattr(self, "_cluster"):
            self._exposed_before_ns, self._begun_s = cluster.telemetry.exposed_ns, time.perf_counter()
        self._cluster, self._total_steps, self.parameters = cluster, total_steps, parameters
        self._start_s = time.perf_counter() - elapsed_s
        self.steps = [step for step in self.steps if step.step <= done]
        self.validations = [validation for validation in self.validations if validation.step <= done]
        ranks, files = _count(self._cluster.world_size, "rank"), _count(text.files, "file")
        self.say(
            f"{parameters / 1e6:.2f} million parameters over {ranks}, {tokens_per_step:,} tokens a step, "
            f"{text.size_bytes / 1e6:.1f} MB of text in {files}"
        )

    def begin_step(self, step: int) -> None:
        self._cluster.telemetry.step = step
        self._last_s, self._last_exposed_ns = time.perf_counter(), self._cluster.telemetry.exposed_ns

    def end_step(self, step: int, *, loss: float, tokens: int, learning_rate: float, gradient_norm: float) -> None:
        """`tokens` counts those of all ranks together."""
        seconds = time.perf_counter() - self._last_s
        exposed_share = (self._cluster.telemetry.exposed_ns - self._last_exposed_ns) / 1e9 / seconds
        record = StepRecord(step, self.elapsed_s, loss, learning_rate, tokens / seconds, gradient_norm, exposed_share)
        self.steps.append(record)
        total_steps = self._expected_steps(step)
        self._cluster.report(
            step=step,
            total_steps=total_steps,
            loss=loss,
            tokens_per_s=record.tokens_per_s,
            exposed_share=exposed_share,
            metrics={"learning_rate": learning_rate, "gradient_norm": gradient_norm},
        )

    def validated(self, step: int, loss: float) -> None:
        self.validations.append(Validation(step, loss))
        trained = f", training loss {self.steps[-1].loss:.3f}, {self.tokens_per_s:,.0f} tokens/s" if self.steps else ""
        self.say(f"step {step} of {self._expected_steps(step)}: validation loss {loss:.3f}{trained}, {self.elapsed_s:.0f} s")

    @property
    def tokens_per_s(self) -> float:
        """The speed of all ranks together: the median of the last steps."""
        recent = [step.tokens_per_s for step in self.steps[-RECENT:]]
        return median(recent) if recent else 0.0

    def _expected_steps(self, step: int) -> int:
        """How many steps there will be, at the speed so far, before the steps or the time run out."""
        in_time = math.ceil(step * self._max_seconds / self.elapsed_s) if self._max_seconds else self._total_steps
        return max(step, min(self._total_steps, in_time))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
