"""`Surroundings`: what torch keeps for each thread, carried from the calling thread to the computing one.

[Note: surroundings] Grad mode, autocast, `with torch.device(...)`, counters of operations and hooks on saved tensors all hold only for
the thread that has entered them. A model that computes in another thread would silently see none of them: an awaited forward inside an
autocast would stay in float32. A profiler that watches a thread cannot be handed over, so a warning says that.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from shardnet.backend.streams import using

log = logging.getLogger(__name__)
_DEVICES = ("cpu", "cuda")


class Surroundings:
    """The surroundings of the thread that makes this object."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocasts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._function_modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch never uses those below the top
        self._is_profiled = torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.KINETO

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply them in this thread, within this context."""
        if self._is_profiled:
            _tell_of_profiler()
        with ExitStack() as left:
            if self._inference != torch.is_inference_mode_enabled():
                left.enter_context(torch.inference_mode(self._inference))
            if self._grad != torch.is_grad_enabled():
                left.enter_context(torch.set_grad_enabled(self._grad))
            left.enter_context(using(self._stream))
            for device, enabled, dtype in self._autocasts:
                if enabled or torch.is_autocast_enabled(device):
                    left.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=self._caches_casts))
            if self._hooks is not None:
                left.enter_context(_pushed(_SAVED_TENSORS, [self._hooks]))
            if self._function_modes:
                left.enter_context(_pushed(_FUNCTIONS, self._function_modes))
            if self._dispatch_modes:
                left.enter_context(_pushed(_OPERATIONS, self._dispatch_modes))
            yield


@dataclass(frozen=True, slots=True)
class _Stack:
    """One of the stacks that torch has for each thread. A mode was entered by the caller, and entering it again would restart a counter,
    for example: so it is only pushed."""

    push: Callable[[Any], None]
    pop: Callable[[Any], object]  # given what is on top
    top: Callable[[], Any]  # None: the stack is empty


@contextmanager
def _pushed(stack: _Stack, entries: Sequence[Any]) -> Iterator[None]:
    """At the end remove these same entries: the program may have pushed others, or removed some."""
    for entry in entries:
        stack.push(entry)
    try:
        yield
    finally:
        there, ours = list[Any](), list(entries)
        while ours and (top := stack.top()) is not None:
            stack.pop(top)
            if top in ours:
                ours.remove(top)
            else:
                there.append(top)
        for entry in reversed(there):
            stack.push(entry)


def _top_function_mode() -> Any:
    return torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]


_SAVED_TENSORS = _Stack(
    lambda hooks: torch._C._autograd._push_saved_tensors_default_hooks(*hooks),
    lambda _: torch._C._autograd._pop_saved_tensors_default_hooks(),
    lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),
)
_FUNCTIONS = _Stack(
    lambda mode: torch.overrides._push_mode(mode),  # type: ignore[no-untyped-call]
    lambda _: torch.overrides._pop_mode(),  # type: ignore[no-untyped-call]
    _top_function_mode,
)
_OPERATIONS = _Stack(
    dispatch._push_mode,
    lambda mode: dispatch._pop_mode(getattr(mode, "_mode_key", None)),
    dispatch._get_current_dispatch_mode,
)


@functools.cache
def _tell_of_profiler() -> None:
    """Once."""
    log.warning(
        "torch's profiler records one thread only, and the model computes in another: give the profiler experimental_config="
        "torch._C._profiler._ExperimentalConfig(profile_all_threads=True)"
    )
