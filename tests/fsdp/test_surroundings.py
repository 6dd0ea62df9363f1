"""Settings that torch keeps per thread also hold for an awaited model, though it computes in another thread."""

# torch has no types for modes:
# mypy: disable-error-code="no-untyped-call"

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from shardnet.fsdp import AsyncFSDP
from shardnet.fsdp.surroundings import _tell_of_profiler
from shardnet.testing import local_cluster

Tensor = torch.Tensor
X = torch.ones(3, 4)


class Model(nn.Module):
    """Makes a tensor in its forward, as models do for masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(self.first(x)), torch.zeros(1)


@pytest.fixture
async def model() -> AsyncIterator[AsyncFSDP]:
    async with local_cluster(1) as ranks, AsyncFSDP(Model(), ranks[0], units=[nn.Linear]) as sharded:
        yield sharded


async def test_autocast(model: AsyncFSDP) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = await model(X)
        assert output.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert (await model(X))[0].dtype == torch.float32
    await model.backward(output.float().sum())
    assert (await model(X))[0].dtype == torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())


async def test_autocast_of_another_dtype_and_without_a_cache(model: AsyncFSDP) -> None:
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert await model.run(lambda: (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())) == (torch.float16, False)


async def test_the_default_device(model: AsyncFSDP) -> None:
    """It counts for tensors that the model makes; shardnet's own tensors have their own device."""
    with torch.device("meta"):
        output, made = await model(X)
        assert (output.device.type, made.device.type) == ("cpu", "meta")
        await model.backward(output.sum())
        norm = await model.clip_grad_norm(1.0)
        state = await model.full_state_dict()
    assert (await model(X))[1].device.type == "cpu"
    assert norm.item() > 0
    assert {value.device.type for value in state.values()} == {"cpu"}


async def test_a_counter_of_operations(model: AsyncFSDP) -> None:
    alone = FlopCounterMode(display=False)
    with alone:
        Model()(X)[0].sum().backward()
    counter = FlopCounterMode(display=False)
    with counter:
        output, _ = await model(X)
        forward = counter.get_total_flops()
        await model.backward(output.sum())
    assert 0 < forward < counter.get_total_flops() == alone.get_total_flops()
    await model(X)
    assert counter.get_total_flops() == alone.get_total_flops()


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self, seen: list[str], name: str) -> None:
        super().__init__()
        self.seen, self.name = seen, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


async def test_modes_in_their_order(model: AsyncFSDP) -> None:
    order = list[str]()
    with Functions() as functions, Operations(order, "outer"), Operations(order, "inner"):
        await model(X)
    assert "linear" in functions.seen
    assert order == ["inner", "outer"] * 2
    seen = len(functions.seen)
    await model(X)
    assert (len(functions.seen), len(order)) == (seen, 4)


@contextlib.contextmanager
def saved_tensors(kept: list[Tensor]) -> Iterator[None]:
    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


async def test_hooks_on_saved_tensors(model: AsyncFSDP) -> None:
    outer, inner = list[Tensor](), list[Tensor]()
    with saved_tensors(outer), saved_tensors(inner):
        output, _ = await model(X)
    assert inner
    assert not outer  # as of one thread: the innermost
    await model.backward(output.sum())
    before = len(inner)
    await model(X)
    assert len(inner) == before


async def test_an_error_leaves_nothing_behind(model: AsyncFSDP) -> None:
    with torch.device("meta"), FlopCounterMode(display=False), torch.autocast("cpu"), saved_tensors([]), pytest.raises(RuntimeError):
        await model(torch.ones(3, 7, device="cpu"))
    output, made = await model(X)
    assert (output.dtype, made.device.type) == (torch.float32, "cpu")
    assert await model.run(torch._C._autograd._top_saved_tensors_default_hooks, False) is None
    assert await model.run(torch._C._len_torch_dispatch_stack) == await model.run(torch._C._len_torch_function_stack) == 0


async def test_what_the_program_leaves_there_stays_and_nothing_else(model: AsyncFSDP) -> None:
    """A function that is run may enter modes that it does not leave, and leave modes that others have entered."""
    kept, mode = list[Tensor](), Operations([], "kept")
    entered = contextlib.ExitStack()
    with Functions(), Operations([], "carried"), saved_tensors([]), saved_tensors([]):
        await model.run(torch.set_default_device, "cpu")
        await model.run(entered.enter_context, mode)
        await model.run(entered.enter_context, saved_tensors(kept))
    assert [each.device.type for each in await model.run(torch.overrides._get_current_function_mode_stack)] == ["cpu"]
    assert await model.run(_get_current_dispatch_mode_stack) == [mode]
    await model(X)
    assert (mode.seen, bool(kept)) == (["kept"] * 2, True)
    with Functions():
        await model.run(torch.set_default_device, None)
    await model.run(entered.close)
    assert await model.run(torch.overrides._get_current_function_mode_stack) == []
    assert await model.run(_get_current_dispatch_mode_stack) == []
    assert await model.run(torch._C._autograd._top_saved_tensors_default_hooks, False) is None


async def test_an_autocast_that_a_function_leaves_on_is_off_for_the_next_call(model: AsyncFSDP) -> None:
    await model.run(torch.set_autocast_enabled, "cpu", True)
    assert (await model(X))[0].dtype == torch.float32


async def test_a_mode_that_was_entered_twice(model: AsyncFSDP) -> None:
    mode = Operations([], "")
    with mode, torch.device("cpu"), mode:
        await model(X)
    assert len(mode.seen) == 4
    assert await model.run(_get_current_dispatch_mode_stack) == []


async def test_who_profiles_one_thread_is_told(model: AsyncFSDP, caplog: pytest.LogCaptureFixture) -> None:
    _tell_of_profiler.cache_clear()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        for _ in range(2):
            await model(X)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "profile_all_threads=True" in said


async def test_who_profiles_all_threads_sees_where_the_model_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def forward(rank: int, model: AsyncFSDP) -> None:
        await asyncio.sleep(0.1 * rank)  # so that the other one waits
        await model(X)

    _tell_of_profiler.cache_clear()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    async with local_cluster(2) as ranks:
        models = await asyncio.gather(*(AsyncFSDP(Model(), rank, units=[nn.Linear]) for rank in ranks))
        await asyncio.gather(*(model(X) for model in models))
        with profile(activities=[ProfilerActivity.CPU], acc_events=True, experimental_config=every_thread) as profiled:
            await asyncio.gather(*(forward(rank, model) for rank, model in enumerate(models)))
        await asyncio.gather(*(model.aclose() for model in models))
    names = {event.key for event in profiled.key_averages()}
    assert {"aten::addmm", "shardnet: gather first", "shardnet: wait for all_gather"} <= names
    assert not caplog.records
