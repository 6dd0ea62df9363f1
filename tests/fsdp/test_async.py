"""The async facade: several ranks in one event loop, which is never blocked."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import torch
import torch.nn.functional as F

from shardnet.backend import LoopbackBackend
from shardnet.config import Timeouts
from shardnet.errors import ClosedError, StateError, UsageError
from shardnet.fsdp import AsyncFSDP
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches


@pytest.fixture
async def backends() -> AsyncIterator[list[LoopbackBackend]]:
    group = LoopbackBackend.create_group(2, timeouts=Timeouts.for_tests())
    yield group
    await asyncio.gather(*(backend.aclose() for backend in group))


BATCHES = token_batches(3, 4)


def train_alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process: the parameters after the last step, and each step's gradient norm."""
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for batch in BATCHES:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


async def test_ranks_train_in_one_loop(backends: list[LoopbackBackend]) -> None:
    expected, norms = await asyncio.to_thread(train_alone)

    async def train(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(make_gpt(), backend, units=[Block]) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch, norm in zip(BATCHES, norms, strict=True):
                mine = batch[2 * backend.rank :][:2]
                logits = await model(mine[:, :-1])
                await model.backward(F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()))
                assert (await model.clip_grad_norm(0.5)).item() == pytest.approx(norm, rel=1e-5)
                await model.step(optimizer)
                optimizer.zero_grad()
            state = await model.full_state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)

    await asyncio.gather(*(train(backend) for backend in backends))


async def test_it_can_be_awaited_and_closed_twice(backends: list[LoopbackBackend]) -> None:
    models = await asyncio.gather(*(_made(backend) for backend in backends))
    outputs = await asyncio.gather(*(model(torch.tensor(2.0)) for model in models))
    assert [output.item() for output in outputs] == [20, 20]
    for model in models:
        await model.aclose()
        await model.aclose()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardnet-compute")]


async def _made(backend: LoopbackBackend) -> AsyncFSDP:
    return await AsyncFSDP(Weighted(), backend)


async def test_a_closed_one_says_so(backends: list[LoopbackBackend]) -> None:
    models = await asyncio.gather(*(_made(backend) for backend in backends))
    await asyncio.gather(*(model.aclose() for model in models))
    for call in (models[0](torch.tensor(1.0)), models[0].full_state_dict(), models[0].run(int)):
        with pytest.raises(ClosedError, match=r"this model was closed.*make a new one"):
            await call
    unmade = AsyncFSDP(Weighted(), backends[0])
    await unmade.aclose()
    with pytest.raises(ClosedError, match="this model was closed"):
        await unmade


async def test_modes_and_loading_are_those_of_the_model(backends: list[LoopbackBackend]) -> None:
    saved = {name: value + 1 for name, value in Weighted().state_dict().items()}
    for model in await asyncio.gather(*(_made(backend) for backend in backends)):
        assert model.eval() is model
        assert not any(module.training for module in model.fsdp.modules())
        assert all(module.training for module in model.train().fsdp.modules())
        await model.load_full_state_dict(saved)
        assert torch.cat([parameter.detach() for parameter in model.parameters()]).min() >= 2
        await model.aclose()


async def test_the_callers_grad_mode_goes_along(backends: list[LoopbackBackend]) -> None:
    models = await asyncio.gather(*(_made(backend) for backend in backends))

    async def forward() -> list[torch.Tensor]:
        return list(await asyncio.gather(*(model(torch.tensor(1.0)) for model in models)))

    assert all(output.requires_grad for output in await forward())
    with torch.no_grad():
        assert not any(output.requires_grad for output in await forward())
    with torch.inference_mode():
        assert all(output.is_inference() for output in await forward())
    evaluated = await asyncio.gather(*(model.evaluate(torch.tensor(1.0)) for model in models))
    assert [(output.item(), output.requires_grad) for output in evaluated] == [(10, False)] * 2
    await asyncio.gather(*(model.aclose() for model in models))


async def test_gradients_accumulate_within_no_sync(backends: list[LoopbackBackend]) -> None:
    async def work(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            x = torch.tensor(1.0)
            with model.no_sync():
                await model.backward(await model(x))
            assert all(parameter.grad is None for parameter in model.parameters())
            await model.backward(await model(x))
            assert [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None] == [[2, 2]]
            assert await model.run(threading.get_ident) != threading.get_ident()

    await asyncio.gather(*(work(backend) for backend in backends))


async def test_a_backward_is_within_no_sync_if_it_is_called_there(backends: list[LoopbackBackend]) -> None:
    """This holds whenever it runs, and whatever other tasks are within no_sync."""

    async def work(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:

            def gradients() -> list[list[float]]:
                return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]

            async def elsewhere() -> None:
                with model.no_sync():
                    inside.set()
                    await left.wait()

            x, inside, left = torch.tensor(1.0), asyncio.Event(), asyncio.Event()
            losses = [await model(x) for _ in range(3)]
            early = asyncio.ensure_future(model.backward(losses[0]))
            await asyncio.sleep(0)
            other = asyncio.ensure_future(elsewhere())
            await inside.wait()
            with model.no_sync():
                await early
                assert gradients() == [[1, 1]]
                within = asyncio.ensure_future(model.backward(losses[1]))
                await asyncio.sleep(0)
            await within
            assert gradients() == [[1, 1]]
            await model.backward(losses[2])  # another task is within no_sync
            assert gradients() == [[3, 3]]
            left.set()
            await other

    await asyncio.gather(*(work(backend) for backend in backends))


async def test_blocks_of_no_sync_end_wherever_they_are_left(backends: list[LoopbackBackend]) -> None:
    """They end in any order, in another task, and in a generator that nobody resumes."""

    async def work(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:

            async def reduces() -> bool:
                for parameter in model.parameters():
                    parameter.grad = None
                model.zero_grad()
                await model.backward(await model(torch.tensor(1.0)))
                return all(parameter.grad is not None for parameter in model.parameters())

            async def batches() -> AsyncGenerator[int, None]:
                with model.no_sync():
                    yield 1
                    yield 2

            async def leave(block: contextlib.AbstractContextManager[None]) -> None:
                block.__exit__(None, None, None)

            first, second, third = model.no_sync(), model.no_sync(), model.no_sync()
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert not await reduces()
            second.__exit__(None, None, None)
            assert await reduces()
            third.__enter__()
            await asyncio.create_task(leave(third))
            assert await reduces()
            left = batches()
            await anext(left)
            assert not await reduces()
            await left.aclose()
            assert await reduces()

    await asyncio.gather(*(work(backend) for backend in backends))


async def test_use_before_it_is_made_is_refused(backends: list[LoopbackBackend]) -> None:
    model = AsyncFSDP(Weighted(), backends[0])
    with pytest.raises(StateError, match="async with"):
        await model(torch.tensor(1.0))
    await model.aclose()


async def test_a_forward_that_was_not_awaited_is_told_so_by_backward() -> None:
    (alone,) = LoopbackBackend.create_group(1, timeouts=Timeouts.for_tests())
    async with AsyncFSDP(Weighted(), alone) as model:
        with pytest.raises(UsageError, match="await model"):
            await model.backward(model(torch.zeros(2)))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="got a value of type float"):
            await model.backward(0.5)  # type: ignore[arg-type]
    await alone.aclose()


async def test_one_that_cannot_be_made_keeps_no_thread(backends: list[LoopbackBackend]) -> None:
    def raises(_: str, __: torch.nn.Module) -> bool:
        raise ValueError("no unit")

    model = AsyncFSDP(torch.nn.Sequential(torch.nn.Linear(2, 2)), backends[0], units=raises)
    with pytest.raises(ValueError, match="no unit"):
        await model
    (thread,) = model._thread._threads
    await asyncio.to_thread(thread.join, 5.0)
    assert not thread.is_alive()


async def test_an_error_in_forward_comes_to_the_caller_and_the_model_goes_on(backends: list[LoopbackBackend]) -> None:
    async def work(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            with pytest.raises(TypeError):
                await model("not a tensor", "and too many")
            assert (await model(torch.tensor(2.0))).item() == 20

    await asyncio.gather(*(work(backend) for backend in backends))


async def test_a_stop_iteration_in_a_call_is_an_error_as_in_a_coroutine(backends: list[LoopbackBackend]) -> None:
    async with AsyncFSDP(Weighted(), backends[0].subgroup([0])) as model:
        with pytest.raises(RuntimeError, match="next raised StopIteration"):
            await model.run(next, iter(()))
        assert await model.run(next, iter([1])) == 1


async def test_a_call_cancelled_before_it_began_never_runs(backends: list[LoopbackBackend]) -> None:
    async def work(backend: LoopbackBackend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            gate = threading.Event()
            ran: list[int] = []
            first = asyncio.create_task(model.run(gate.wait))
            second = asyncio.create_task(model.run(ran.append, 1))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.set()
            assert await first
            await model.run(ran.append, 2)
            assert ran == [2]

    await asyncio.gather(*(work(backend) for backend in backends))
