"""`PerformanceRecorder`: watches a training and keeps its figures."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, AsyncFSDP
from shardnet.fsdp.timeline import OPTIMIZER
from shardnet.performance.busy import BusyTime
from shardnet.performance.communication import CommunicationOperation
from shardnet.performance.figures import TrainingFigures
from shardnet.performance.zero3 import Zero3PerformanceStats
from shardnet.telemetry import Pass, TransferDirection

MAX_STEP_TIMES = 10_000  # the last ones, for percentiles
REDUCTIONS = (CommunicationOperation.REDUCE_SCATTER, CommunicationOperation.ALL_REDUCE)
COMPRESSED_REDUCTION = "all_to_all"  # if its label is that of gradients
# The collectives' names in the statistics; others, such as barriers, are not counted there.
OPERATIONS = {operation.value: operation for operation in CommunicationOperation} | {"send": CommunicationOperation.POINT_TO_POINT}


@dataclass(slots=True)
class _Totals:
    """What adds up step by step."""

    samples: int = 0
    tokens: int = 0
    compute_ns: int = 0
    exposed_ns: int = 0
    communicating_ns: int = 0
    bytes_sent: int = 0
    network_bytes: int = 0


class SteppingOptimizer(Protocol):
    """What the recorder needs of an optimizer: every `torch.optim.Optimizer` has it."""

    param_groups: list[dict[str, Any]]

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any: ...

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


class PerformanceRecorder:
    """Fills `zero3` and `figures()` from what model, optimizer and collectives of this rank do.

        with PerformanceRecorder(model, optimizer) as recorder:
            for x, y in batches:
                recorder.count(samples=len(x))
                ...  # forward, backward, step
            print(recorder.figures())

    The first step begins when the recorder is made; leaving the `with` block, or `close()`, ends the recording. The
    recorder sees every collective of the backend, also those of other models. A pass counts as compute, except the time
    it waits; a unit of the model counts as a layer, executed once per pass. Without FSDP, as with ZeRO-1, give the
    backend in place of the model: then no passes and layers are recorded. Only FSDP and `ZeroOptimizer` measure how long
    they wait; collectives that the program awaits itself do not count as waiting. What goes over the network is compared
    with `link_bytes_per_s`, from `measure_link`, where that link leads to another node. Times are the host's: work queued
    on an accelerator counts where the host waits for it.

    It is cheap: some additions per unit and per collective. Any thread may call `figures`.
    """

    def __init__(self, model: FSDP | AsyncFSDP | Backend, optimizer: SteppingOptimizer, *, link_bytes_per_s: float | None = None) -> None:
        fsdp = model.fsdp if isinstance(model, AsyncFSDP) else model
        backend = fsdp.backend if isinstance(fsdp, FSDP) else fsdp
        if not hasattr(optimizer, "register_step_post_hook"):
            raise UsageError(f"optimizer must have step hooks, as a torch.optim.Optimizer has, got {type(optimizer).__name__}")
        if link_bytes_per_s is not None and not link_bytes_per_s > 0:
            raise UsageError(f"link_bytes_per_s must be more than 0, got {link_bytes_per_s}")
        self.zero3 = Zero3PerformanceStats()
        self._fsdp = fsdp if isinstance(fsdp, FSDP) else None
        self._telemetry = backend.telemetry
        self._world_size = backend.world_size
        groups = fsdp.groups if isinstance(fsdp, FSDP) else []
        # numbers of elements, by the labels of a reduction and of its average over replicas
        self._gradients = {label: group.layout.numel for group in groups for label in (group.label, group.reduction_label)}
        node = next(ranks for ranks in backend.node_ranks if backend.rank in ranks)
        stays = (backend.rank + 1) % backend.world_size in node  # then the link is the node's memory, and says nothing of the network
        self._link_bytes_per_s = 0.0 if stays and link_bytes_per_s is not None else link_bytes_per_s
        self._lock = threading.Lock()  # passes end on the training thread, collectives on any
        self._totals = _Totals()  # up to now, except times that are totals elsewhere
        self._settled = _Totals()  # up to the end of the last step
        self._uncounted = {Pass.FORWARD: 0, Pass.BACKWARD: 0}  # tokens that no pass of the kind has taken yet
        self._busy = BusyTime()
        self._steps = self._wall_ns = 0
        self._step_ns: deque[int] = deque(maxlen=MAX_STEP_TIMES)
        self._pauses = 0
        self._since_ns = time.perf_counter_ns()  # when the step that is under way began, plus the time that is left out
        self._exposed_before_ns = self._telemetry.exposed_ns
        self._network_bytes_before = self._telemetry.network_bytes_sent
        self._stepping_ns = 0  # when the optimizer began
        self._updated: int | None = None  # elements that the optimizer has stepped in the backward under way; None: it has not
        self._hooks = [optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step)]
        self._telemetry.observe(self)

    def close(self) -> None:
        """Stop watching; the figures stay. Safe to call twice."""
        self._telemetry.forget(self)
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "PerformanceRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- what the program says

    def count(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Give the samples and tokens in the batch of this rank's next forward and backward. Count each batch once."""
        if min(samples, tokens) < 0:
            raise UsageError(f"samples and tokens must not be negative, got {samples} and {tokens}")
        with self._lock:
            self._totals.samples += samples
            self._totals.tokens += tokens
            for kind in self._uncounted:
                self._uncounted[kind] += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done within this context, such as a validation: neither its time nor its passes and collectives count."""
        with self._lock:
            self._pauses += 1
            start, exposed, sent = time.perf_counter_ns(), self._telemetry.exposed_ns, self._telemetry.network_bytes_sent
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses:
                    self._since_ns += time.perf_counter_ns() - start
                    self._exposed_before_ns += self._telemetry.exposed_ns - exposed
                    self._network_bytes_before += self._telemetry.network_bytes_sent - sent

    def figures(self) -> TrainingFigures:
        """This rank's figures up to the end of the last step."""
        with self._lock:
            settled, wall_s, communicating_s = self._settled, self._wall_ns / 1e9, self._settled.communicating_ns / 1e9
            knows_waiting = self._telemetry.times_waiting or not communicating_s
            return TrainingFigures(
                steps=self._steps,
                wall_s=wall_s,
                step_s=tuple(each / 1e9 for each in self._step_ns),
                samples=settled.samples,
                tokens=settled.tokens,
                rank_s=wall_s,
                compute_s=settled.compute_ns / 1e9,
                exposed_s=settled.exposed_ns / 1e9 if knows_waiting else math.nan,
                communicating_s=communicating_s,
                bytes_sent=settled.bytes_sent,
                network_bytes=settled.network_bytes,
                capacity_bytes=None if self._link_bytes_per_s is None else communicating_s * self._link_bytes_per_s,
            )

    # --- what the training does

    def on_step(self, step: int) -> None:
        """Does nothing: the optimizer's steps count here."""

    def on_pass(self, kind: Pass, computed_ns: Mapping[str, int]) -> None:
        stepped_ns = computed_ns.get(OPTIMIZER, 0)
        duration = sum(computed_ns.values()) - stepped_ns
        with self._lock:
            if self._pauses:
                return
            self._totals.compute_ns += duration
            tokens, self._uncounted[kind] = self._uncounted[kind], 0
            if kind is Pass.FORWARD:
                self.zero3.record_forward_pass(duration, tokens)
            else:
                self.zero3.record_backward_pass(duration, tokens)
            self._record_layers(kind, computed_ns)
            updated, self._updated = self._updated, None
            if updated is not None and kind is Pass.BACKWARD:
                self._end_step(stepped_ns, updated, time.perf_counter_ns())

    def _record_layers(self, kind: Pass, computed_ns: Mapping[str, int]) -> None:
        layers: dict[str, int] = {}
        for span, duration in computed_ns.items():
            if span == OPTIMIZER:
                continue
            layer = span.rpartition(" ")[0]  # a backward that recomputes has spans "layer forward" as well
            layers[layer] = layers.get(layer, 0) + duration
        record = self.zero3.record_layer_execution if kind is Pass.FORWARD else self.zero3.record_layer_backward
        for layer, duration in layers.items():
            record(layer, duration)

    def on_collective(self, op: str, label: str, start_ns: int, end_ns: int, bytes_sent: int) -> None:
        with self._lock:
            if self._pauses:
                return
            self._busy.add(start_ns, end_ns)
            self._totals.bytes_sent += bytes_sent
            operation = OPERATIONS.get(op)
            if op == COMPRESSED_REDUCTION and label in self._gradients:
                operation = CommunicationOperation.REDUCE_SCATTER
            if operation in REDUCTIONS and label in self._gradients:
                self.zero3.record_gradient_sync(
                    end_ns - start_ns, self._gradients[label], self._world_size, operation=operation, bytes=bytes_sent
                )
            elif operation is not None:
                self.zero3.record_communication(operation, end_ns - start_ns, bytes_sent)

    def on_transfer(self, direction: TransferDirection, duration_ns: int, bytes: int) -> None:
        with self._lock:
            if not self._pauses:
                self.zero3.record_parameter_transfer(duration_ns, bytes, direction)

    def _before_step(self, *_: object) -> None:
        self._stepping_ns = time.perf_counter_ns()

    def _after_step(self, optimizer: SteppingOptimizer, *_: object) -> None:
        now = time.perf_counter_ns()
        updated = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        with self._lock:
            if self._pauses:
                return
            if self._fsdp is not None and self._fsdp.is_stepping_in_backward:
                self._updated = (self._updated or 0) + updated  # in parts: the step ends with backward
            elif updated or self._fsdp is None or not self._fsdp.steps_in_backward:  # otherwise it is the call that may stay in the loop
                self._end_step(now - self._stepping_ns, updated, now)

    def _end_step(self, stepping_ns: int, updated: int, now: int) -> None:
        """Hold the lock to call this. `stepping_ns` is how long the optimizer took."""
        self.zero3.record_optimizer_step(stepping_ns, updated)
        self._totals.compute_ns += stepping_ns
        self._steps += 1
        self._wall_ns += now - self._since_ns
        self._step_ns.append(now - self._since_ns)
        self._since_ns = now
        exposed_ns = self._telemetry.exposed_ns - self._exposed_before_ns
        network_bytes = self._telemetry.network_bytes_sent - self._network_bytes_before
        self._settled = replace(self._totals, exposed_ns=exposed_ns, communicating_ns=self._busy.total_ns, network_bytes=network_bytes)
