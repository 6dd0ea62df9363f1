"""On a GPU gathers come after the step and whatever reads parameters after the gathers, whatever thread and stream each of them is on.

The CPU's memory stands in for a GPU's, and its streams and events only note what they come after.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend, streams
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.backend.streams import Copy, CopyStreams
from shardnet.loop import THREAD_NAME
from shardnet.zero import ZeroOptimizer
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import WIDTH, Place, make_model

CPU = torch.device("cpu")


class Stream:
    """Knows the events that all work queued on it from now on comes after."""

    def __init__(self) -> None:
        self.past: frozenset[Event] = frozenset()

    def wait_event(self, event: "Event") -> None:
        self.past |= event.past

    def wait_stream(self, other: "Stream") -> None:
        self.past |= other.past


class Event:
    """Knows the events that come before it, and itself."""

    past: frozenset["Event"] = frozenset()

    def record(self, stream: Stream) -> None:
        stream.past = self.past = stream.past | {self}

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class Streams(threading.local):
    """Each thread's current stream: at first the same for all, as on a GPU."""

    current = Stream()

    @contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


class Watched(CopyStreams):
    """Notes what copies come after, and on which threads they were asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fetched: list[tuple[str, Event]] = []
        self.placed: list[tuple[Event, Copy]] = []

    def fetch(self, source: torch.Tensor, after: Event) -> Copy:
        self.fetched.append((threading.current_thread().name, after))
        return super().fetch(source, after)

    def place(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Copy:
        self.placed.append((after, super().place(source, target, after)))
        return self.placed[-1][1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """From now on float32 is on a GPU."""
    of_threads = Streams()
    fakes: dict[str, Callable[..., Any]] = {
        "current_stream": lambda _: of_threads.current,
        "new_stream": lambda _: Stream(),
        "using": of_threads.using,
        "_event": lambda _: Event(),
    }
    for name, fake in fakes.items():
        original = getattr(streams, name)
        for module in [module for title, module in sys.modules.items() if title.startswith("shardnet.")]:
            if vars(module).get(name) is original:
                monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(MeshBackend, "_is_on_gpu", staticmethod(lambda tensor: tensor.dtype == torch.float32))
    return of_threads


class Training:
    """One rank's model of three units, its optimizer and a step, on a stream of its own. Rank 1 takes part in gathers once `gate` is open:
    so rank 0 has started its first ones by then, and the last one starts on the loop thread."""

    def __init__(self, backend: Backend, gate: threading.Event) -> None:
        self.model = make_model()
        self.optimizer = ZeroOptimizer(self.model.parameters(), optim.SGD, backend, module=self.model, units=[nn.Linear], lr=0.1)
        self.watched = Watched(CPU)
        self.optimizer._comms.gathers._staging._make_streams = lambda _: self.watched  # type: ignore[attr-defined]
        self.stepped: Event

        def note(*_: object) -> None:
            self.stepped = streams.now(CPU)
            assert backend.rank == 0 or gate.wait(10)

        self.optimizer._require_inner().register_step_post_hook(note)
        Place(backend).loss(self.model, 0).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def check_arrived(self) -> None:
        """What the current stream does next must come after all gathers."""
        past = streams.now(CPU).past
        assert [copy.end in past for _, copy in self.watched.placed] == [True] * 3


def test_gathers_come_between_the_step_and_the_forward(gpu: Streams) -> None:
    """And they need not wait for what the program queues after the step: otherwise nothing would overlap."""
    gate = threading.Event()

    def work(backend: Backend) -> None:
        with gpu.using(Stream()):
            training = Training(backend, gate)
            later = streams.now(CPU)
            gate.set()
            training.model(torch.ones(1, WIDTH))
            training.check_arrived()
        if backend.rank == 0:
            fetched, placed = training.watched.fetched, training.watched.placed
            assert [thread for thread, _ in fetched] == ["rank 0", "rank 0", THREAD_NAME]
            for event in [*(after for _, after in fetched), *(after for after, _ in placed)]:
                assert training.stepped in event.past
                assert later not in event.past

    run_ranks(2, work)


def test_the_training_waits_even_if_another_stream_has_waited_before(gpu: Streams) -> None:
    """For example one on which another thread averages weights."""
    gate = threading.Event()

    def work(backend: Backend) -> None:
        with gpu.using(Stream()):
            training = Training(backend, gate)
            gate.set()
            with gpu.using(Stream()):
                list(training.model.parameters())
                training.check_arrived()
            training.check_arrived()

    run_ranks(2, work)


def test_nothing_waits_on_the_stream_that_all_threads_have_at_first(gpu: Streams) -> None:
    """The loop thread has it, too: what another model computes there would wait for these gathers."""
    gate = threading.Event()

    def work(backend: Backend) -> None:
        with gpu.using(Stream()):
            training = Training(backend, gate)
            gate.set()
            training.optimizer.wait()
            training.check_arrived()
        assert not any(copy.end in streams.now(CPU).past for _, copy in training.watched.placed)

    run_ranks(2, work)
