"""Ranks that fail or disagree: the error says who and what, and nothing stays gathered."""

import threading

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, PeerLost
from shardnet.fsdp import FSDP
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

BATCH = token_batches(1, 2)[0]


def test_ranks_that_wrap_differently_are_told_so() -> None:
    def work(backend: Backend) -> str:
        with pytest.raises(CollectiveMismatch) as refused:
            FSDP(make_gpt(), backend, units=[Block] if backend.rank else None)
        return str(refused.value)

    for message in run_ranks(2, work):
        assert "rank 0" in message
        assert "rank 1" in message
        assert "GPT (initial, layout " in message


def test_ranks_whose_parameters_differ_in_shape_alone_are_told_so() -> None:
    def work(backend: Backend) -> str:
        with pytest.raises(CollectiveMismatch) as refused:
            FSDP(torch.nn.Linear(*((3, 4) if backend.rank else (4, 3)), bias=False), backend)
        return str(refused.value)

    for message in run_ranks(2, work):
        assert message.count("Linear (initial, layout ") >= 2


def test_ranks_that_use_units_in_another_order_are_told_so() -> None:
    def work(backend: Backend) -> str:
        inner = make_gpt()
        model = FSDP(inner, backend, units=[Block], prefetch=0)
        inner.blocks = torch.nn.ModuleList(reversed(inner.blocks)) if backend.rank else inner.blocks
        with pytest.raises(CollectiveMismatch) as refused:
            model(BATCH[:, :-1])
        check_at_rest(model)
        return str(refused.value)

    for message in run_ranks(2, work):
        assert "blocks.0" in message
        assert "blocks.2" in message


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_peer_lost_before_forward(prefetch: int) -> None:
    wrapped = threading.Barrier(2)  # of threads: nothing may be under way when the rank goes

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], prefetch=prefetch)
        wrapped.wait()
        if backend.rank == 1:
            backend.abort()
            return
        with pytest.raises(CollectiveError, match="rank 1"):
            model(BATCH[:, :-1])
        check_at_rest(model)

    run_ranks(2, work)


def test_a_peer_lost_before_backward() -> None:
    forward_done = threading.Barrier(2)

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block])
        loss = loss_of(model, BATCH)
        forward_done.wait()
        if backend.rank == 1:
            backend.abort()
            return
        with pytest.raises(CollectiveError, match="rank 1"):
            loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(CollectiveError, match="rank 1"):
            model(BATCH[:, :-1])  # cleans up first, and then fails as it must
        check_at_rest(model)

    run_ranks(2, work)


def test_the_users_collectives_may_come_at_any_time() -> None:
    """Each rank reduces something of its own at another place between the gathers."""

    def work(backend: Backend) -> list[float]:
        inner = make_gpt()
        results = []

        def meanwhile(*_: object) -> None:
            results.append(backend.all_reduce(torch.tensor([backend.rank + 1.0])))

        inner.blocks[2 * backend.rank].register_forward_pre_hook(meanwhile)
        model = FSDP(inner, backend, units=[Block])
        for _ in range(3):
            loss_of(model, BATCH).backward()  # type: ignore[no-untyped-call]
        return [pending.wait().item() for pending in results]

    assert run_ranks(2, work) == [[3.0] * 3] * 2


def test_a_closed_backend_leaves_nothing_gathered() -> None:
    wrapped = threading.Barrier(2)

    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        wrapped.wait()
        backend.abort()
        with pytest.raises((ClosedError, PeerLost)):
            model(torch.tensor(1.0))
        check_at_rest(model)

    run_ranks(2, work)
