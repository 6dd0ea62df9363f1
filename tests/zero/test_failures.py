"""Ranks that disagree, fail or are closed: the error says who and what, and nothing hangs or goes on with half a step."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend, Pending
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, PeerLost, StateError
from shardnet.zero import ZeroOptimizer
from shardnet.zero.bucket import BucketState
from shardnet.zero.gathers import AT_ONCE
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import WIDTH, Place, make_model

Make = Callable[[Backend], Any]
BUCKETS = 5  # of the model below with `bucket_bytes=64`


def parameters(*shapes: tuple[int, ...], **options: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, **options)) for shape in shapes]


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "message"),
    [
        (
            lambda b: ZeroOptimizer(parameters((2,)), optim.SGD, b),
            lambda b: ZeroOptimizer(parameters((2,), (3,)), optim.SGD, b),
            "rank 0 has group 0 of 1 parameters with .* but rank 1 has group 0 of 2 parameters",
        ),
        (
            lambda b: ZeroOptimizer(parameters((4,), (2, 3)), optim.SGD, b),
            lambda b: ZeroOptimizer(parameters((4,), (3, 2)), optim.SGD, b),
            r"rank 0 has parameter 1 of group 0 \(float32 \[2, 3\]\), but rank 1 has parameter 1 of group 0 \(float32 \[3, 2\]\)",
        ),
        (
            lambda b: ZeroOptimizer(parameters((4,)), optim.SGD, b),
            lambda b: ZeroOptimizer(parameters((4,), dtype=torch.float64), optim.SGD, b),
            r"\(float32 \[4\]\), but rank 1 has .*\(float64 \[4\]\)",
        ),
        (
            lambda b: ZeroOptimizer([("a", nn.Parameter(torch.ones(1)))], optim.SGD, b),
            lambda b: ZeroOptimizer([("b", nn.Parameter(torch.ones(1)))], optim.SGD, b),
            r"rank 0 has a \(float32 \[1\]\), but rank 1 has b \(float32 \[1\]\)",
        ),
        (
            lambda b: ZeroOptimizer(parameters((4,)), optim.SGD, b, lr=0.1),
            lambda b: ZeroOptimizer(parameters((4,)), optim.SGD, b, lr=0.2),
            r"with .*lr=0.1.* but rank 1 has .*lr=0.2",
        ),
        (
            lambda b: ZeroOptimizer(parameters((4,)), optim.Adam, b),
            lambda b: ZeroOptimizer(parameters((4,)), optim.AdamW, b),
            "rank 0 has Adam split by elements.* but rank 1 has AdamW split by elements",
        ),
        (
            lambda b: ZeroOptimizer([{"params": parameters((4,))}], optim.SGD, b),
            lambda b: ZeroOptimizer([{"params": parameters((4,))}, {"params": parameters((4,))}], optim.SGD, b),
            "rank 0 has nothing more, but rank 1 has group 1 of 1 parameters",
        ),
    ],
    ids=["number", "shape", "dtype", "name", "option", "class", "groups"],
)
def test_ranks_that_make_different_optimizers_are_told_so(rank_0: Make, rank_1: Make, message: str) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(CollectiveMismatch, match=rf"\[rank {backend.rank}/2\] the optimizers differ: .*{message}"):
            (rank_1 if backend.rank else rank_0)(backend)

    run_ranks(2, work)


def test_a_group_that_differs_is_not_added() -> None:
    def work(backend: Backend) -> list[float]:
        (weight,) = parameters((3,))
        optimizer = ZeroOptimizer([weight], optim.SGD, backend, lr=1.0)
        with pytest.raises(CollectiveMismatch, match="optimizers differ"):
            optimizer.add_param_group({"params": parameters((backend.rank,))})
        assert len(optimizer.param_groups) == 1
        weight.grad = torch.ones(3)
        optimizer.step()
        return weight.tolist()

    assert run_ranks(2, work) == [[0.0] * 3] * 2


def test_a_closed_backend_says_so() -> None:
    made = threading.Barrier(2)

    def work(backend: Backend) -> None:
        (weight,) = parameters((3,))
        optimizer = ZeroOptimizer([weight], optim.SGD, backend)
        weight.grad = torch.ones(3)
        made.wait()
        backend.abort()
        with pytest.raises((ClosedError, PeerLost)):
            optimizer.step()
        with pytest.raises((ClosedError, PeerLost)):
            ZeroOptimizer(parameters((3,)), optim.SGD, backend)
        assert weight.tolist() == [1.0] * 3

    run_ranks(2, work)


def test_a_peer_that_is_lost_before_a_step_leaves_everything_as_it_was() -> None:
    made = threading.Barrier(2)

    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend, module=model, bucket_bytes=64)
        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        made.wait()
        if backend.rank == 1:
            backend.abort()
            return
        for refused in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(CollectiveError, match="rank 1"):
                refused()
        assert not optimizer.state
        assert all(piece.grad is None for piece in optimizer._sharded.pieces.values())
        for name, value in model.state_dict().items():
            assert torch.equal(value, make_model().state_dict()[name])
        model(torch.ones(1, WIDTH))  # a forward needs no other rank

    run_ranks(2, work)


@pytest.mark.parametrize("overlapping", [True, False])
def test_a_peer_that_is_lost_between_stepping_and_gathering(overlapping: bool) -> None:
    """The survivor holds half of a step: from then on, every call says so."""

    def work(backend: Backend) -> None:
        model = make_model()
        choices: dict[str, Any] = {"module": model, "units": [nn.Linear]} if overlapping else {}
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend, bucket_bytes=64, **choices)
        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]

        def step_and_use() -> None:
            optimizer.step()
            model(torch.ones(1, WIDTH))

        if backend.rank == 1:
            optimizer._require_inner().register_step_post_hook(lambda *_: backend.abort())
            with pytest.raises(ClosedError):
                step_and_use()
            return
        with pytest.raises(CollectiveError, match="rank 1"):
            step_and_use()
        for refused in (optimizer.wait, optimizer.step, optimizer.consolidated_state_dict):
            with pytest.raises(StateError, match="a mixture of old and new values, because gathering them failed"):
                refused()
        if overlapping:
            with pytest.raises(StateError, match="load a checkpoint"):
                model(torch.ones(1, WIDTH))

    run_ranks(2, work)


def step_with(backend: Backend, all_gather: Callable[[int, Callable[[], Pending[Any]]], Pending[Any]]) -> tuple[nn.Module, ZeroOptimizer]:
    """A step with gathers that rank 0 makes with this function, of their number and what makes one."""
    model = make_model()
    optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=[nn.Linear], bucket_bytes=64, lr=0.1)
    assert len(optimizer._sharded.buckets) == BUCKETS > AT_ONCE
    Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
    if backend.rank == 0:
        gathers, numbers = optimizer._comms.gathers, count()
        make = gathers.all_gather
        gathers.all_gather = lambda *args, **options: all_gather(next(numbers), partial(make, *args, **options))  # type: ignore[method-assign]
    optimizer.step()
    for _, bucket in optimizer._sharded.buckets:  # none goes on for ever
        with suppress(RuntimeError):
            bucket._pending.wait(5)
    return model, optimizer


@pytest.mark.parametrize("number", [0, AT_ONCE, BUCKETS - 1])
def test_a_gather_that_cannot_be_started_for_a_reason_of_torchs(number: int) -> None:
    """For example because there is no pinned memory. It starts on the loop thread, where the error would only be logged. The others hear
    of it at once, and all other parameters are gathered."""

    def all_gather(each: int, make: Callable[[], Pending[Any]]) -> Pending[Any]:
        if each == number:
            raise RuntimeError("no pinned memory")
        return make()

    def work(backend: Backend) -> None:
        model, optimizer = step_with(backend, all_gather)
        with pytest.raises(CollectiveError if backend.rank else RuntimeError, match="no pinned memory"):
            model(torch.ones(1, WIDTH))
        for _ in range(2):
            with pytest.raises(StateError, match="a mixture of old and new values, because gathering them failed"):
                optimizer.wait()
        states = [bucket.state for _, bucket in optimizer._sharded.buckets]
        assert states == [BucketState.TORN if each == number else BucketState.COMPLETE for each in range(BUCKETS)]

    run_ranks(2, work)


def test_a_ctrl_c_while_a_gather_starts_is_raised_and_stops_no_other_gather() -> None:
    """The first one: no other one is under way then whose end would start the rest."""

    def work(backend: Backend) -> None:
        model, interrupts = make_model(), iter([True])
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=[nn.Linear], bucket_bytes=64, lr=0.1)
        make = optimizer._comms.gathers.all_gather

        def all_gather(*args: Any, **options: Any) -> Pending[Any]:
            pending = make(*args, **options)
            if next(interrupts, False):
                pending.quietly()  # nobody has it
                raise KeyboardInterrupt
            return pending

        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        if backend.rank == 0:
            optimizer._comms.gathers.all_gather = all_gather  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            with pytest.raises(CollectiveError, match=r"the gather of .* was interrupted \(KeyboardInterrupt\)"):
                optimizer.wait()
        else:
            optimizer.step()
            optimizer.wait()
        states = [bucket.state for _, bucket in optimizer._sharded.buckets]
        assert states[1:] == [BucketState.COMPLETE] * (BUCKETS - 1)

    run_ranks(2, work)


def test_a_gather_whose_result_a_gpu_cannot_wait_for() -> None:
    """The error comes where the gather ends, on the loop thread."""

    def all_gather(_: int, make: Callable[[], Pending[Any]]) -> Pending[Any]:
        def arrive() -> None:
            raise RuntimeError("an illegal memory access")

        pending = make()
        pending.arrives(arrive)
        return pending

    def work(backend: Backend) -> None:
        model, _ = step_with(backend, all_gather)
        if backend.rank == 0:
            with pytest.raises(RuntimeError, match="an illegal memory access"):
                model(torch.ones(1, WIDTH))
        else:
            model(torch.ones(1, WIDTH))

    run_ranks(2, work)
