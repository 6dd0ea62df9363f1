"""Calls that copy or add up much memory release the GIL meanwhile, so the training computes and the loop thread answers its peers.

[Note: who holds the interpreter] Python takes the GIL from a thread only after the switch interval. If that is an hour, a thread gets the
GIL only when another one releases it. So a second thread, which looks at the clock whenever it can, sees how long the first one has kept
the GIL at a time. A call that keeps it does so from beginning to end, on any machine. Even with a call that releases it, the second thread
may rarely run if it is not woken in time; then there is another try.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.collectives.exchange import Exchange
from shardnet.collectives.reduction import ReduceOp, Reduction, as_array, copy_bytes
from shardnet.config import MIB
from shardnet.transport.shared_memory import Loan, Mailbox, Segment, futex, lending
from shardnet.transport.shared_memory.lending import Borrowed
from shardnet.transport.shared_memory.window import Window
from shardnet.wire import Chunk

COPIED_BYTES = 128 * MIB  # some 10 ms or more, in which a thread that waits for the interpreter is woken many times
ADDED_BYTES = 64 * MIB  # of each part: what is widened is there several times
LOOK_EVERY_S = 0.0005
SWITCH_S = 3600.0
MOST_KEPT = 0.25  # the longest time at once, as a share of the call's time
TRIES = 20

Call = Callable[[], object]


def share_kept(call: Call) -> float:
    """The longest time in which no other thread could get the GIL, as a share of the call's time."""
    looks: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            looks.append(time.monotonic())

    watcher, usual_s = threading.Thread(target=look, name="watcher"), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        watcher.start()
        began = time.monotonic()
        call()
        ended = time.monotonic()
    finally:
        over.set()
        sys.setswitchinterval(usual_s)
        watcher.join()
    times = [began, *(each for each in looks if began < each < ended), ended]
    return max(later - earlier for earlier, later in pairwise(times)) / (ended - began)


def least_kept(call: Call) -> float:
    """The least share of some tries, which end with one that is good enough."""
    shares: list[float] = []
    while len(shares) < TRIES and min(shares, default=1.0) >= MOST_KEPT:
        shares.append(share_kept(call))
    return min(shares)


@pytest.fixture(scope="module")
def source() -> np.ndarray:
    return np.ones(COPIED_BYTES, np.uint8)


@pytest.fixture(scope="module")
def target() -> np.ndarray:
    return np.zeros(COPIED_BYTES, np.uint8)


# --- calls that keep it, or nothing below means anything


def assign(source: np.ndarray, target: np.ndarray) -> None:
    target.data[:] = source.data


def move(source: np.ndarray, target: np.ndarray) -> None:
    """Copy by a C function that is called like one of Python's own, which keeps the GIL."""
    memmove = ctypes.PyDLL(None).memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


@pytest.mark.parametrize("copy", [assign, move])
def test_who_keeps_it_is_seen(source: np.ndarray, target: np.ndarray, copy: Callable[[np.ndarray, np.ndarray], None]) -> None:
    shares = [share_kept(lambda: copy(source, target)) for _ in range(TRIES)]
    assert median(shares) > 0.9
    assert min(shares) > MOST_KEPT, "it would be taken for one that lets go"


# --- copies


def test_what_came_is_copied_to_where_it_belongs(source: np.ndarray, target: np.ndarray) -> None:
    assert least_kept(lambda: copy_bytes(source.data, target)) < MOST_KEPT


def test_what_an_exchange_receives_is_copied_to_where_it_belongs(source: np.ndarray, target: np.ndarray) -> None:
    """In all_to_all, and in a receive."""
    chunk = Chunk(1, 0, 0, data=source.data)
    assert least_kept(lambda: Exchange({}, {1: target}, [1])._on_chunk(1, chunk)) < MOST_KEPT


@pytest.mark.skipif(lending._process_vm_readv is None, reason="this system has no process_vm_readv")
def test_a_loan_is_read(source: np.ndarray, target: np.ndarray) -> None:
    loan = Loan()
    borrowed = Borrowed.of(os.getpid(), loan.of(source.data))
    assert least_kept(lambda: borrowed.read(0, target)) < MOST_KEPT


@pytest.fixture
def window() -> Iterator[Window]:
    window = Window(COPIED_BYTES, lambda _: None)
    yield window
    window.close()


def test_a_piece_is_put_into_a_window(source: np.ndarray, window: Window) -> None:
    def put() -> None:
        piece = at_once(window.put(source.data, [1]))
        window.release(1, piece.end)

    assert least_kept(put) < MOST_KEPT


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing, and return its result; there is no event loop that would release the GIL."""
    with pytest.raises(StopIteration) as returned:
        coroutine.send(None)
    return returned.value.value


@pytest.mark.skipif(not futex.available, reason="there are no mailboxes here")
def test_a_letter_is_left(source: np.ndarray) -> None:
    mailbox = Mailbox(0, COPIED_BYTES)

    def post() -> None:
        assert mailbox.post(1, 0, b"", source.data, [])
        mailbox.withdraw(1, 0)

    try:
        assert least_kept(post) < MOST_KEPT
    finally:
        mailbox.hide()


def test_memory_in_common_is_allocated() -> None:
    assert least_kept(lambda: Segment(COPIED_BYTES).close()) < MOST_KEPT


# --- sums


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, torch.float32),
        (ReduceOp.MEAN, torch.float64),
        (ReduceOp.MAX, torch.int64),
        (ReduceOp.BOR, torch.bool),
    ],
    ids=str,
)
def test_parts_are_added_up(op: ReduceOp, dtype: torch.dtype) -> None:
    parts = [ones(dtype), ones(dtype)]
    out, reduction = np.empty_like(parts[0]), Reduction(op, dtype, len(parts))
    assert least_kept(lambda: reduction.reduce(parts, out)) < MOST_KEPT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_widened_and_narrowed_again(dtype: torch.dtype) -> None:
    """Each is tested alone: each takes so long that in a whole sum nobody would see that the other one keeps the GIL."""
    part, reduction = ones(dtype), Reduction(ReduceOp.SUM, dtype, 2)
    total = reduction.widen(part)
    assert least_kept(lambda: reduction.widen(part)) < MOST_KEPT
    assert least_kept(lambda: reduction.finish(total, part)) < MOST_KEPT


def ones(dtype: torch.dtype) -> np.ndarray:
    return as_array(torch.ones(ADDED_BYTES // dtype.itemsize, dtype=dtype))
