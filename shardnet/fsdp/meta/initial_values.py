"""`InitialValues`: what fills a module that was built on the meta device."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from shardnet.backend import ReduceOp
from shardnet.errors import SizeMismatchError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.initial import ROOT
from shardnet.fsdp.placement import PlacedParameter

Tensor = torch.Tensor
InitFunction = Callable[[nn.Module], object]
NAMED_AT_MOST = 5  # in one message


class InitialValues:
    """A function or the modules' `reset_parameters()`, and perhaps a state for the tensors that states contain.

    Every rank calls the functions, since they may set more than tensors, but rank 0's values count. Only rank 0 reads the state, each
    tensor when its turn comes. Functions are called for everything, or, where a state is given, for modules with buffers that are in
    no state. Raises UsageError for a state that is not a mapping.
    """

    def __init__(self, param_init_fn: InitFunction | None, state: Mapping[str, Tensor] | None, rank: int) -> None:
        if not isinstance(state, Mapping | None):
            raise UsageError(
                "initial_state must be a mapping from names to whole tensors, such as shardnet.checkpoint.open_weights(path), "
                f"got a value of type {type(state).__name__}"
            )
        self._function = param_init_fn
        self._state = state
        self._keys = frozenset(state or ())
        self.filled_here = state is None or rank == ROOT

    @property
    def advice(self) -> str:
        """What to do about a tensor that was not filled."""
        source = "param_init_fn" if self._function is not None else "reset_parameters()"
        return f"{source} must fill all parameters and buffers of the module itself, on the device where they are"

    def calls(self, module: nn.Module) -> bool:
        """Whether a function must fill the module: its own parameters and buffers, unless the state has all of them."""
        if self._state is not None and module._buffers.keys().isdisjoint(module._non_persistent_buffers_set):
            return False
        return self._function is not None or (bool(_own_tensors(module)) and hasattr(module, "reset_parameters"))

    def call(self, module: nn.Module) -> None:
        """Let the function fill a module that it `calls`."""
        if self._function is not None:
            self._function(module)
        else:
            cast(Callable[[], object], module.reset_parameters)()

    def load_parameter(self, placed: PlacedParameter, into: Tensor) -> None:
        """Read a whole parameter from the state into `into`, if there is one and this rank reads it."""
        if self._state is not None and self.filled_here:
            self._load(next(name for name in placed.names if name in self._keys), into)

    def load_buffer(self, name: str, into: Tensor) -> None:
        """Read a buffer into `into`, if the state has it."""
        if self._state is not None and self.filled_here and name in self._keys:
            self._load(name, into)

    def check_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Raise UsageError for modules that hold something on meta which nothing would fill."""
        if self._function is not None or self._state is not None:
            return
        helpless = [
            f"{name or 'the wrapped module'} ({type(module).__name__})"
            for name, module in modules
            if any(tensor.is_meta for tensor in _own_tensors(module)) and not hasattr(module, "reset_parameters")
        ]
        if helpless:
            raise UsageError(
                f"{listed(helpless)}: holds parameters or buffers on meta but has no reset_parameters() to fill them; "
                "define that method, or give param_init_fn or initial_state"
            )

    def check_state(
        self, parameters: Iterable[PlacedParameter], *, buffers: Iterable[str], known: Iterable[str], comms: Communicators
    ) -> None:
        """Raise UsageError on all ranks if the state lacks a parameter or a buffer, or has what is not `known`. No values are
        read. A collective, if there is a state."""
        with self.agreed("this model", comms):
            if self._state is not None and self.filled_here:
                self._check_names(parameters, buffers, known)

    @contextmanager
    def agreed(self, what: str, comms: Communicators) -> Iterator[None]:
        """If the body raises on any rank, all ranks raise: the others a UsageError. A collective, if there is a state.

        Only rank 0 reads the state, so only rank 0 meets its errors; the others would otherwise wait for what it never sends.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self._state is None:
                raise
            error = raised
        if self._state is None:
            return
        failed = torch.tensor([-1 if error is None else comms.everyone.rank], dtype=torch.int32, device="cpu")
        verdict = comms.everyone.all_reduce(failed, ReduceOp.MAX, label=f"whether initial_state fits {what}")
        failed_rank = int(comms.wait(verdict, "check initial_state").item())
        if error is not None:
            raise error
        if failed_rank >= 0:
            raise UsageError(f"filling {what} with rank {ROOT}'s initial_state failed on rank {failed_rank}; the error there says why")

    def _check_names(self, parameters: Iterable[PlacedParameter], buffers: Iterable[str], known: Iterable[str]) -> None:
        missing = [placed.name for placed in parameters if self._keys.isdisjoint(placed.names)]
        if missing := [*missing, *(name for name in buffers if name not in self._keys)]:
            raise UsageError(f"initial_state lacks {listed(missing)}; give a whole state, such as full_state_dict() returns")
        if unexpected := sorted(self._keys.difference(known)):
            raise UsageError(f"initial_state has {listed(unexpected)}, which the model lacks; leave these entries out")

    def _load(self, name: str, into: Tensor) -> None:
        assert self._state is not None
        whole = self._state[name]
        if whole.shape != into.shape:
            raise SizeMismatchError(tuple(into.shape), tuple(whole.shape), f"as the shape of {name} in initial_state")
        into.copy_(whole)


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
