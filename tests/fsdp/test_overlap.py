"""What the trace must show: the next unit is on its way while one computes, and waiting time is marked as such."""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import pytest
import torch
from torch import nn

from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.fsdp import FSDP, Compression
from shardnet.fsdp.timeline import Timeline
from shardnet.fsdp.unit import UnitState
from shardnet.telemetry import Telemetry, Track
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
LAYERS = 6


class Watched(nn.Module):
    """A residual layer that calls `look` while it computes, forward and backward."""

    def __init__(self, look: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        self.look("forward")
        y: Tensor = x + self.linear(x)
        if y.requires_grad:
            inside = y * 1
            inside.register_hook(lambda _: self.look("backward"))  # type: ignore[no-untyped-call]
            return inside * 1
        return y


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_next_units_are_gathered_while_one_computes(prefetch: int) -> None:
    def work(backend: Backend) -> None:
        seen: list[tuple[str, int, list[int], int]] = []

        def look_from(index: int) -> Callable[[str], None]:
            def look(direction: str) -> None:
                ready = [number for number, unit in enumerate(model.units[1:]) if unit.state in (UnitState.GATHERING, UnitState.HELD)]
                allocated = sum(group.full_is_allocated for unit in model.units[1:] for group in unit.groups)
                seen.append((direction, index, ready, allocated))

            return look

        layers = nn.Sequential(*(Watched(look_from(index)) for index in range(LAYERS)))
        model = FSDP(layers, backend, units=[Watched], prefetch=prefetch)
        for _ in range(2):
            seen.clear()
            model(torch.ones(2, 3)).sum().backward()
            forward, backward = seen[:LAYERS], seen[LAYERS:]
            assert [index for _, index, _, _ in forward] == list(range(LAYERS))
            assert [index for _, index, _, _ in backward] == list(reversed(range(LAYERS)))
            for direction, index, ready, allocated in seen:
                following = range(index + 1, index + 1 + prefetch) if direction == "forward" else range(index - prefetch, index)
                assert {number for number in following if 0 <= number < LAYERS} <= set(ready)
                assert allocated <= 1 + prefetch

    run_ranks(2, work)


@pytest.mark.parametrize(("compression", "full"), [(None, 1), (Compression(gradients="int8"), 0)])
def test_reductions_start_while_backward_goes_on_and_are_bounded(compression: Compression | None, full: int) -> None:
    """`full`: whether full-size gradients wait for the network, or packed ones."""

    def work(backend: Backend) -> None:
        started: list[tuple[int, int]] = []

        def look_from(index: int) -> Callable[[str], None]:
            def look(direction: str) -> None:
                if direction == "backward":
                    waiting = model.memory.full_gradients.current_bytes // (12 * 4)
                    done = sum(any(parameter.grad is not None for parameter in layer.parameters()) for layer in layers)
                    started.append((done, waiting))

            return look

        layers = nn.Sequential(*(Watched(look_from(index)) for index in range(LAYERS)))
        model = FSDP(layers, backend, units=[Watched], prefetch=1, compression=compression)
        model(torch.ones(2, 3)).sum().backward()
        # Two reductions may be under way; older ones were waited for, and their gradients set.
        assert started == [(0, 0), (0, 1 * full), (0, 2 * full), (1, 2 * full), (2, 2 * full), (3, 2 * full)]

    run_ranks(2, work)


def test_spans_do_not_overlap_and_name_the_units() -> None:
    def work(backend: Backend) -> None:
        backend.telemetry.tracing = True
        model = FSDP(make_gpt(), backend, units=[Block])
        backend.all_reduce(torch.zeros(1), ReduceOp.SUM).wait()
        first = len(backend.telemetry.spans())
        loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]
        spans = backend.telemetry.spans()[first:]
        mine = sorted((span for span in spans if span.track is not Track.COMMUNICATION), key=lambda span: span.start_ns)
        for left, right in pairwise(mine):
            assert left.end_ns <= right.start_ns, (left, right)
        computed = {span.name for span in mine if span.track is Track.COMPUTE}
        units = ["GPT", "blocks.0", "blocks.1", "blocks.2"]
        assert computed == {f"{unit} {direction}" for unit in units for direction in ("forward", "backward")}
        communicated = " ".join(span.name for span in spans if span.track is Track.COMMUNICATION)
        assert all(f"of {unit}" in communicated for unit in units)

    run_ranks(2, work)


def test_waiting_is_not_computing() -> None:
    class DoneWhenWaitedFor(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            self.set_result(7)
            return super().result(timeout)

    telemetry = Telemetry(tracing=True)
    timeline = Timeline(telemetry)
    timeline.compute("layer forward")
    assert timeline.wait(Pending(DoneWhenWaitedFor(), "all_gather"), "gather next") == 7
    timeline.compute(None)
    spans = telemetry.spans()
    assert [(span.name, span.track) for span in spans] == [
        ("layer forward", Track.COMPUTE),
        ("gather next", Track.EXPOSED),
        ("layer forward", Track.COMPUTE),
    ]
    assert telemetry.exposed_ns == spans[1].end_ns - spans[1].start_ns > 0


def test_a_collective_that_is_done_is_not_waited_for() -> None:
    telemetry = Telemetry(tracing=True)
    assert Timeline(telemetry).wait(Pending.done_with(7, "all_gather"), "gather next") == 7
    assert telemetry.spans() == []
