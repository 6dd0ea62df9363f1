"""`Gathers`: the parameters that are being gathered after a step, and the modules that wait for them.

[Note: gathers in turn] Gathers that run at once share the network, so all of them end late. With few at once the first
units' parameters arrive before the last units' gathers begin, so the next forward can begin; with one at a time the
network idles in between. Measured with eight gathers of 16 MiB between two processes (variants in turns in one run,
medians of 14): with all at once the first had arrived after 15 ms, the fourth after 43 and the last after 53; with two at
once after 10, 27 and 52; with one after the other after 7, 30 and 60.

[Note: gathers on a GPU] All gathers but the first ones start on the loop thread. Its own stream has not waited for the step,
if the program trains on a stream of its own, so they would send old values. Started on the program's stream they would
wait for the forward, which is queued there by then and waits for them: nothing would overlap. So they start on a side
stream, which waits for the step and for nothing that is queued later. Those who wait for parameters have their own
stream wait for them, and not the loop thread's.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, ItemsView, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch import nn

from shardnet.backend.streams import Stream, new_stream
from shardnet.errors import InheritedError
from shardnet.uncompiled import uncompiled
from shardnet.zero.bucket import Bucket, BucketState, Owned

AT_ONCE = 2  # see [Note: gathers in turn]


class Gathers:
    """The buckets that a step has begun to gather and that nobody has waited for yet.

    Lives as long as the optimizer or a module that waits for it: a module must get its parameters even if the
    optimizer is gone. Between steps it is empty, so it keeps no memory of a former optimizer alive.
    """

    def __init__(self) -> None:
        self._under_way: list[Owned] = []
        self._sides: dict[torch.device, Stream] = {}  # see [Note: gathers on a GPU]
        self._lock = threading.RLock()  # any thread may read parameters, and has to wait then
        self._pid = os.getpid()

    @property
    def are_under_way(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._under_way)

    def start(self, buckets: Sequence[Owned]) -> None:
        """Begin to gather buckets that were stepped, in this order. A collective."""
        with self._lock:
            self._under_way += buckets
            for _, bucket in buckets:
                bucket.stepped(self._side(bucket.device))
        _Turns([bucket for _, bucket in buckets]).advance()

    def _side(self, device: torch.device) -> Stream:
        if device not in self._sides:
            self._sides[device] = new_stream(device)
        return self._sides[device]

    def wait(self) -> None:
        """Block until everything is gathered."""
        self._finish(lambda _: True)

    def wait_for(self, unit: int | None) -> None:
        """Block until the parameters of one unit are gathered; None: those that belong to no unit."""
        self._finish(lambda each: each == unit)

    def _finish(self, of: Callable[[int | None], bool]) -> None:
        """Raises InheritedError in a forked child for what is under way: that arrives in its parent, where a thread may hold the lock."""
        if os.getpid() != self._pid:
            if any(of(unit) for unit, _ in self._under_way):
                raise InheritedError
            return
        with self._lock:
            try:
                for unit, bucket in self._under_way:
                    if of(unit):
                        bucket.finish_gather()
            except Exception:
                self._settle()
                raise
            finally:
                self._under_way = [entry for entry in self._under_way if entry[1].state is not BucketState.COMPLETE]

    def _settle(self) -> None:
        """After an error: wait for everything that is under way, whether it succeeds or fails. TORN buckets stay here, so that later waits
        raise."""
        for _, bucket in self._under_way:
            try:
                bucket.finish_gather()
            except Exception:  # noqa: BLE001 - the first error is raised, and the others would follow from it
                continue


class _Turns:
    """Starts the gathers of one step in order, each when one before it has ended. See [Note: gathers in turn]."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._waiting = deque(buckets)
        self._free = AT_ONCE
        self._lock = threading.RLock()  # gathers end on the loop thread, or at once on the caller's
        self._advancing = False

    def advance(self) -> None:
        """Start what may start. It holds the lock, since the order of the starts is that of the collectives."""
        with self._lock:
            if self._advancing:
                return  # a gather ended at once, within the loop below, which sees that a place is free
            self._advancing, interrupt = True, None
            while self._waiting and self._free:
                self._free -= 1
                try:
                    self._waiting.popleft().start_gather(self._ended)
                except BaseException as error:  # noqa: BLE001 - a Ctrl-C: other ranks take part in the gathers that are left
                    interrupt = error
            self._advancing = False
            if interrupt is not None:
                raise interrupt

    def _ended(self) -> None:
        with self._lock:
            self._free += 1
        self.advance()


class AwaitedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters`: whoever reads one of them, by its name or by iterating as `parameters()` does, waits until it is gathered.
    Averages of weights, norms for a log and copies of a module are made between a step and the next forward."""

    def __init__(self, held: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(held)
        self._awaited: list[tuple[Gathers, Collection[int]]] = []  # for each optimizer, the units that have these parameters

    def wait_for(self, gathers: Gathers, units: Collection[int]) -> None:
        """Wait for these, too, from now on."""
        self._awaited.append((gathers, units))

    def _wait(self) -> None:
        if torch.compiler.is_compiling():
            return  # a forward that is compiled waits before it begins, and whether there is anything to wait for must be no guard
        for gathers, units in self._awaited:
            if gathers.are_under_way:
                for unit in units:
                    gathers.wait_for(unit)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._wait()
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # a dict's own view is a subclass of this
        self._wait()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self._wait()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        self._wait()
        return dict, (dict(self),)  # a copy of the module waits for nothing


def wait_before_use(module: nn.Module, needs: Mapping[nn.Module, Collection[int]], gathers: Gathers) -> None:
    """Let each module's forward wait for the units that it needs, whoever reads a parameter for its unit, and loading and saving the
    outermost module for all."""

    @uncompiled
    def wait_for_all(*_: Any) -> None:
        gathers.wait()

    def before_forward(units: Collection[int]) -> Any:
        @uncompiled
        def wait_for_units(*_: Any) -> None:
            for unit in units:
                gathers.wait_for(unit)

        return wait_for_units

    for part, units in needs.items():
        held = part._parameters
        if not isinstance(held, AwaitedParameters):
            held = vars(part)["_parameters"] = AwaitedParameters(held)
        held.wait_for(gathers, units)
        part.register_forward_pre_hook(before_forward(units), prepend=True)
    module.register_state_dict_pre_hook(wait_for_all)  # type: ignore[no-untyped-call]  # torch has no annotation for it
    module.register_load_state_dict_pre_hook(wait_for_all)  # type: ignore[no-untyped-call]  # torch has no annotation for it
