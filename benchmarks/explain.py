"""Where the time of shardnet's collectives goes: what a caller waits for, and what the loop thread does meanwhile. In a round of
letters the calling thread does the work itself.

The thread that works runs under cProfile, which makes Python itself look slower than it is: believe the figures for large
collectives, and for small ones only their order.
"""

import cProfile
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType

import torch
import torch.distributed as dist

from benchmarks.parts import (
    BUSY,
    CHECKSUMS,
    COLLECTIVES,
    COPYING,
    DATA,
    HANDED_OVER,
    PARTS,
    PEERS,
    RECEIVING,
    REDUCING,
    SENDING,
    TLS,
    TRANSPORT,
)
from benchmarks.race import Contender
from shardnet import Backend
from shardnet.collectives.letters.round import Round
from shardnet.loop import LoopThread

RUNS = 5
# A copy by numpy or by the kernel from another process has no entry of its own in the profile: it counts for its caller.
_COPIES = {
    ("reduction.py", "copy_bytes"),
    ("window.py", "put"),
    ("lending.py", "_read"),
    ("hierarchical.py", "_write_own"),
    ("loans.py", "_write"),
}
# Calls through ctypes have none either.
_CALLS = {("futex.py", "wait"): PEERS, ("futex.py", "wait_any"): PEERS, ("round.py", "_wait"): PEERS, ("futex.py", "wake"): SENDING}

Explanation = dict[str, float]  # ms of one run, by part


def explain(op: str, contender: Contender, backend: Backend) -> Explanation:
    """Mean over runs and ranks, equal on all ranks; the parts add up to the whole time between call and result. A collective.

    `op` is the name under which the backend counts what the contender runs.
    """
    with_profile = _Profiled(here=_is_round(contender))  # what came before that run was the peer's
    counter = backend.telemetry.ops[op]
    seconds, waited_s, wall_s = counter.seconds, counter.waited_s, 0.0
    for _ in range(RUNS):
        contender.prepare()
        dist.barrier()
        with_profile.start()
        start = time.perf_counter()
        contender.run()
        wall_s += time.perf_counter() - start
        with_profile.stop()
    busy = with_profile.parts()
    if with_profile.here:
        parts = {**busy, HANDED_OVER: max(0.0, wall_s - sum(busy.values())), DATA: 0.0}
    else:
        inside_s = counter.seconds - seconds
        idle_s = max(0.0, inside_s - sum(busy.values()))
        peers_s = min(idle_s, counter.waited_s - waited_s)  # time in which the loop thread works while it waits for peers is not waiting
        parts = {**busy, HANDED_OVER: wall_s - inside_s, PEERS: peers_s, DATA: idle_s - peers_s}
    mean_ms = torch.tensor([parts[name] for name in PARTS], dtype=torch.float64) * 1e3 / RUNS / backend.world_size
    dist.all_reduce(mean_ms)
    return dict(zip(PARTS, mean_ms.tolist(), strict=True))


def _is_round(contender: Contender) -> bool:
    """Find out by trying whether this thread does the work."""
    profile = cProfile.Profile()
    contender.prepare()
    profile.runcall(contender.run)
    return any(entry.code is Round.advance.__code__ for entry in profile.getstats())


class _Profiled:
    """The loop thread, or this one, under cProfile from `start` to `stop`, as often as these are called."""

    def __init__(self, *, here: bool) -> None:
        self.here = here
        self._profile = cProfile.Profile()

    def start(self) -> None:
        self._profile.enable() if self.here else _on_loop(self._profile.enable)

    def stop(self) -> None:
        self._profile.disable() if self.here else _on_loop(self._profile.disable)

    def parts(self) -> dict[str, float]:
        """Seconds by part; functions of other packages count for the part that their kind of work belongs to."""
        seconds = dict.fromkeys((PEERS, *BUSY), 0.0)
        for entry in self._profile.getstats():
            seconds[_part_of(entry.code)] += entry.inlinetime
        return seconds


def _on_loop(function: Callable[[], object]) -> None:
    """Run on the loop thread, and wait until it has."""
    done = threading.Event()
    loop = LoopThread.shared()
    loop.call(function)
    loop.call(done.set)
    done.wait()


_BUILT_IN = (
    *(("_ssl.", TLS), ("'send", SENDING), ("'recv", RECEIVING)),
    *(("crc32c", CHECKSUMS), ("google", TRANSPORT), ("numpy", COPYING)),
)


def _part_of(code: CodeType | str) -> str:
    """Decide by the name of a built-in function, or by the file of a Python function."""
    if isinstance(code, str):
        return next((part for name, part in _BUILT_IN if name in code), COLLECTIVES)
    path, name = PurePath(code.co_filename), code.co_name
    if (path.name, name) in _CALLS:
        return _CALLS[path.name, name]
    if (path.name, name) in _COPIES or "numpy" in path.parts:
        return COPYING
    if path.name == "reduction.py":
        return REDUCING
    if path.name == "ssl.py":
        return TLS
    return TRANSPORT if "transport" in path.parts or "protobuf" in path.parts or path.name == "wire.py" else COLLECTIVES
