"""What a worker process does for test_misuse.py: again and again one rank calls another collective than the others, or none."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.errors import CollectiveMismatch, CollectiveTimeout

Start = Callable[[Backend, int], Pending[Any]]  # starts a collective of so many elements


@dataclass(frozen=True)
class Call:
    """A collective, and what errors call it."""

    words: str  # N: the number of elements
    start: Start


SUM = Call("all_reduce(float32 [N], sum)", lambda b, n: b.all_reduce(_ones(n)))
GATHER = Call("all_gather(float32 [N])", lambda b, n: b.all_gather(_ones(n)))
SKIPPED = "a skipped call"
CASES: dict[str, tuple[Call, Call]] = {  # what the others call, and what the odd rank calls
    "shape": (SUM, Call("all_reduce(float32 [1, N], sum)", lambda b, n: b.all_reduce(_ones(1, n)))),
    "size": (GATHER, Call("all_gather(float32 [N, 2])", lambda b, n: b.all_gather(_ones(n, 2)))),
    "dtype": (GATHER, Call("all_gather(int32 [N])", lambda b, n: b.all_gather(_ones(n).int()))),
    "op": (SUM, Call("all_reduce(float32 [N], max)", lambda b, n: b.all_reduce(_ones(n), ReduceOp.MAX))),
    "collective": (Call("reduce_scatter(float32 [N], sum)", lambda b, n: b.reduce_scatter(_ones(n))), SUM),
    "barrier": (SUM, Call("barrier()", lambda b, _: b.barrier())),
}


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


class Culprit:
    """One rank's part; `odd` is the rank that does wrong. Each call's outcome is a dictionary that JSON can carry."""

    def __init__(self, backend: Backend, odd: int, elements: int, timeout_s: float) -> None:
        self._backend = backend
        self._is_odd = backend.rank == odd
        self._elements = elements
        self._timeout_s = timeout_s
        self._gate = backend.subgroup(range(backend.world_size))  # has its own numbers, so it opens whatever becomes of other calls

    def run(self) -> list[dict[str, Any]]:
        said = [self._disagree(name, odd if self._is_odd else usual) for name, (usual, odd) in CASES.items()]
        return [*said, *self._swap(), self._skip()]

    def _disagree(self, name: str, call: Call) -> dict[str, Any]:
        self._gate.barrier().wait()
        return self._note(name, call) | self._next()

    def _swap(self) -> list[dict[str, Any]]:
        """The odd rank calls two layers in the other order: both calls are wrong."""
        self._gate.barrier().wait()
        labels = ("layer 2", "layer 1") if self._is_odd else ("layer 1", "layer 2")
        start = time.monotonic()
        pending = [self._backend.all_gather(_ones(self._elements), label=label) for label in labels]
        said = [self._settle("order", f"{GATHER.words} of {label}", start, each) for label, each in zip(labels, pending, strict=True)]
        return [each | self._next() for each in said]

    def _skip(self) -> dict[str, Any]:
        """The odd rank skips a call: the others time out, and when it calls after that, it is told at once."""
        self._gate.barrier().wait()
        said: dict[str, Any] = {}
        if not self._is_odd:
            said = self._note(SKIPPED, Call(SUM.words, lambda b, n: b.all_reduce(_ones(n), timeout_s=self._timeout_s)))
        self._gate.barrier().wait()
        return (said or self._note(SKIPPED, SUM)) | self._next()

    def _note(self, name: str, call: Call) -> dict[str, Any]:
        start = time.monotonic()
        return self._settle(name, call.words, start, call.start(self._backend, self._elements))

    def _settle(self, name: str, words: str, start: float, pending: Pending[Any]) -> dict[str, Any]:
        try:
            pending.wait()
        except (CollectiveMismatch, CollectiveTimeout) as error:
            facts = {"case": name, "called": words.replace("N", str(self._elements)), "called_s": start, "failed_s": time.monotonic()}
            return {**facts, "error": type(error).__name__, "message": str(error)}
        raise AssertionError(f"{name}: nobody noticed")

    def _next(self) -> dict[str, Any]:
        """Whether the next collective works."""
        total = self._backend.all_reduce(_ones(self._elements)).wait()
        return {"next": bool((total == self._backend.world_size).all())}


def misuse(backend: Backend, runs: list[tuple[int, int]], timeout_s: float) -> list[dict[str, Any]]:
    """For `Worker.call`. Each of `runs` says which rank does wrong, and with how many elements."""
    return [{"odd": odd, **said} for odd, elements in runs for said in Culprit(backend, odd, elements, timeout_s).run()]
