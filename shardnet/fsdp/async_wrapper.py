"""`AsyncFSDP`: a sharded model for async programs."""

import asyncio
import contextvars
import inspect
import os
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import ClosedError, InheritedError, StateError, UsageError
from shardnet.fsdp.grad_scaler import GradScaler
from shardnet.fsdp.optimizers import check_state
from shardnet.fsdp.options import ShardingOptions
from shardnet.fsdp.placement import UnitChoice
from shardnet.fsdp.state import FullState
from shardnet.fsdp.surroundings import Surroundings
from shardnet.fsdp.uneven import UnevenSteps, count_samples
from shardnet.fsdp.wrapper import FSDP

P = ParamSpec("P")
T = TypeVar("T")
Tensor = torch.Tensor

_SYNC = nullcontext()
_CONVERSIONS = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "to_empty", "type"})


@dataclass(eq=False)
class _AddingUp:
    """A block of `no_sync`. Contexts that were copied within it keep this object, so when the block ends, it ends for them, too."""

    model: "AsyncFSDP | None"


# The blocks that the caller is within. A call reads this when it is made, not when it runs: by then others may be calling elsewhere.
_adding_up: contextvars.ContextVar[tuple[_AddingUp, ...]] = contextvars.ContextVar("adding up", default=())


class AsyncFSDP:
    """An `FSDP` with a compute thread of its own, so that nothing it does blocks the event loop.

        async with AsyncFSDP(module, backend, units=[Block]) as model:
            loss = await model(x)
            await model.backward(loss)
            await model.step(optimizer)

    `await AsyncFSDP(...)` makes it, too; then `aclose()` ends it. Calls run one after the other in the order in which they were made, with
    the caller's context variables and the state that torch keeps for the caller's thread: grad mode, autocast, `with torch.device(...)`,
    counters of operations, hooks on saved tensors, the stream of a GPU. That state belongs to the event loop's thread, so tasks share it:
    `with torch.no_grad()` around an await is right only while no other task computes; `evaluate` is always right. A call that is cancelled
    before it begins never runs; a running one goes on to its end, since the other ranks take part in it. The backend is not closed.
    """

    def __init__(self, module: nn.Module, backend: Backend, *, units: UnitChoice = None, **options: Unpack[ShardingOptions]) -> None:
        """The arguments are those of `FSDP`."""
        self._make = lambda: FSDP(module, backend, units=units, **options)
        self._fsdp: FSDP | None = None
        self._closed = False
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"shardnet-compute-{backend.rank}")

    @property
    def fsdp(self) -> FSDP:
        """The wrapped model itself. Use its methods through `run`, so that they wait for their turn."""
        if self._fsdp is None:
            raise StateError(
                "this AsyncFSDP has not been started: use `async with AsyncFSDP(...) as model`, or `model = await AsyncFSDP(...)`"
            )
        return self._fsdp

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the compute thread. Raises ClosedError after `aclose`."""
        if os.getpid() != self._pid:
            raise InheritedError  # the compute thread exists only in the other process
        if self._closed:
            raise ClosedError("this model was closed, by aclose() or when its cluster or epoch ended; make a new one with cluster.shard()")
        call, surroundings = contextvars.copy_context().run, Surroundings()
        adds_up = any(block.model is self for block in _adding_up.get())

        def work() -> T:
            # torch has one thread for the backwards of all models on a GPU, on which backwards of several ranks would wait for each other
            with torch.autograd.set_multithreading_enabled(False), surroundings.entered(), self.fsdp.no_sync() if adds_up else _SYNC:
                try:
                    return call(function, *args, **kwargs)
                except StopIteration as error:  # neither a future nor a coroutine can raise it
                    raise RuntimeError(f"{getattr(function, '__qualname__', function)} raised StopIteration") from error

        return await asyncio.wrap_future(self._thread.submit(work))

    # --- training

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward."""
        return await self.run(self.fsdp, *args, **kwargs)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients, in the mode that the module is in: `model.eval()` switches dropout off."""
        return await self.run(_without_gradients, self.fsdp, *args, **kwargs)

    async def backward(self, loss: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """`loss.backward()`; when it returns the gradients are reduced, unless within `no_sync`.

        Raises UsageError for a loss that is no tensor.
        """
        _check_loss(loss)
        await self.run(loss.backward, gradient, retain_graph)

    async def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        """`optimizer.step()`; with a `scaler` its `step(optimizer)` and `update()`. That is a collective.

        The loss comes from `scaler.scale(loss)`. To clip, `await model.run(scaler.unscale_, optimizer)` first; with several
        optimizers, run the scaler's methods yourself, since `update` must be called once in an iteration.

        Raises what `FSDP.check_step` does, UsageError for torch's own scaler, and StateError for an optimizer's state that does not fit.
        """
        if scaler is not None and not isinstance(scaler, GradScaler) and scaler.is_enabled():
            raise UsageError(
                f"a {type(scaler).__module__}.{type(scaler).__name__} decides on each rank alone, by that rank's slices of the gradients, "
                "whether to skip a step; use shardnet.fsdp.GradScaler(backend)"
            )
        await self.run(_step, self.fsdp, optimizer, scaler)

    def step_in_backward(self, *optimizers: torch.optim.Optimizer) -> None:
        """See `FSDP.step_in_backward`. Not while a call is under way."""
        self.fsdp.step_in_backward(*optimizers)

    async def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `FSDP.clip_grad_norm_`."""
        return await self.run(self.fsdp.clip_grad_norm_, max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `FSDP.no_sync`. It holds for the backwards that this task, and tasks that it creates within the block, call within the
        block."""
        block = _AddingUp(self)
        _adding_up.set((*_adding_up.get(), block))
        try:
            yield
        finally:
            block.model = None  # this may be another task than the one that entered the block
            _adding_up.set(tuple(each for each in _adding_up.get() if each.model is not None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `FSDP.zero_grad`. Not while a call is under way."""
        self.fsdp.zero_grad(set_to_none)

    def uneven(
        self,
        batches: Iterable[T] | AsyncIterable[T],
        *,
        samples: Callable[[T], int] = count_samples,
        accumulate: int = 1,
        dummy: T | None = None,
    ) -> UnevenSteps[T]:
        """See `FSDP.uneven`; for `async for`. Batches are read on the event loop's thread, or awaited there."""
        return self.fsdp.uneven(batches, samples=samples, accumulate=accumulate, dummy=dummy)

    # --- parameters

    def train(self, mode: bool = True) -> "AsyncFSDP":
        """As for a module: dropout and the like are on. Not while a call is under way."""
        self.fsdp.train(mode)
        return self

    def eval(self) -> "AsyncFSDP":
        """As for a module: dropout and the like are off. Not while a call is under way."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's slices, for an optimizer."""
        return self.fsdp.parameters()

    async def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """See `FSDP.full_state_dict`."""
        return await self.run(self.fsdp.full_state_dict, rank0_only=rank0_only)

    async def load_full_state_dict(self, full: FullState, *, strict: bool = True) -> Any:
        """See `FSDP.load_full_state_dict`."""
        return await self.run(self.fsdp.load_full_state_dict, full, strict=strict)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.fsdp.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name in _CONVERSIONS:
            raise AttributeError(f"a sharded model cannot be moved or converted: call .{name}() on the module before you shard it")
        inside = {} if name.startswith("_") or self._fsdp is None else {"fsdp": self._fsdp, "fsdp.module": self._fsdp.module}
        for path, owner in inside.items():
            if hasattr(owner, name):
                raise AttributeError(
                    f"AsyncFSDP has no attribute {name!r}, but its {type(owner).__name__} has: use model.{path}.{name}; if it computes, "
                    "call it within a function given to model.run(), on all ranks"
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- beginning and end

    async def _start(self) -> "AsyncFSDP":
        if self._fsdp is None:
            try:
                self._fsdp = await self.run(self._make)
            except BaseException:
                self._thread.shutdown(wait=False)  # a caller that only awaits the model has nothing to close
                raise
        return self

    def __await__(self) -> Generator[Any, None, "AsyncFSDP"]:
        return self._start().__await__()

    async def __aenter__(self) -> "AsyncFSDP":
        try:
            return await self._start()
        except BaseException:
            await self.aclose()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Wait for the calls that were made, and for the collectives that they have begun, and end the compute thread. Safe to call
        twice."""
        if not self._closed:
            self._closed = True
            if self._fsdp is not None:
                self._thread.submit(self._fsdp.settle)
        await asyncio.to_thread(self._thread.shutdown)


def _step(fsdp: FSDP, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    fsdp.check_step(optimizer)
    try:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    except RuntimeError:
        check_state(optimizer)
        raise


@torch.no_grad()
def _without_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _check_loss(loss: object) -> None:
    """Say what is wrong to a caller who forgot to await the model: an AttributeError would not."""
    if inspect.iscoroutine(loss):
        loss.close()
        raise UsageError("backward() needs the loss as a tensor, got a coroutine: await the call of the model, as in `await model(x)`")
    if not isinstance(loss, Tensor):
        raise UsageError(f"backward() needs the loss as a tensor, got a value of type {type(loss).__name__}")
