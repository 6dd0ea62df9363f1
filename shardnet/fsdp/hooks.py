"""Attaching the runtime to the modules."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardnet.errors import StateError
from shardnet.fsdp.known import KnownParameters
from shardnet.fsdp.precision import MixedPrecision
from shardnet.fsdp.runtime import Runtime
from shardnet.fsdp.unit import Unit
from shardnet.uncompiled import uncompiled


def attach(unit: Unit, runtime: Runtime, precision: MixedPrecision, known: KnownParameters, *, outermost: bool) -> list[RemovableHandle]:
    """Call the runtime around every forward of the unit's module, and cast its inputs and, if it is the outermost, its outputs.

    The runtime sets autograd's hooks in each forward: on inputs after they are cast and on outputs before they are, so that the
    hooks enclose what the unit computes. Recomputation within backward casts in the same way. torch.compile compiles what is
    between the hooks.
    """

    @uncompiled
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _refuse_copy(unit, is_own=module is unit.module)
        _check_past_wrapper(runtime, known)
        inputs = precision.cast_inputs(args, kwargs)
        runtime.before_forward(unit, inputs)
        return inputs

    @uncompiled
    def after(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        runtime.after_forward(unit, outputs)
        return precision.cast_outputs(outputs) if outermost else outputs

    return [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, always_call=True),  # also when forward raises: nothing stays gathered
    ]


def attach_to_parts(
    unit: Unit, parts: Iterable[nn.Module], runtime: Runtime, precision: MixedPrecision, known: KnownParameters
) -> list[RemovableHandle]:
    """If one of these modules of a unit is called while the unit is not at work, have the runtime treat that as a call of the unit. This
    happens in programs that use an encoder alone, or that put the inner model into another one.

    When the unit is at work, which is the usual case, these hooks only look. torch.compile, which compiles the modules with the unit, skips
    the hooks.
    """
    own = frozenset(parts)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_dynamo_compiling() or not runtime.before_part(unit, module):
            return None
        _refuse_copy(unit, is_own=module in own)
        _check_past_wrapper(runtime, known)
        inputs = precision.cast_inputs(args, kwargs)
        runtime.before_forward(unit, inputs, module)
        return inputs

    def after(module: nn.Module, _: tuple[Any, ...], outputs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not runtime.after_part(module):
            return None
        runtime.after_forward(unit, outputs)
        return precision.cast_outputs(outputs)

    return [
        handle
        for part in own
        for handle in (
            part.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            part.register_forward_hook(after, always_call=True),
        )
    ]


def _check_past_wrapper(runtime: Runtime, known: KnownParameters) -> None:
    """Check before a module is called directly. A call of the wrapper has checked already, and nothing replaces summoned ones."""
    if not (runtime.is_called or runtime.summoned):
        known.check()


def _refuse_copy(unit: Unit, *, is_own: bool) -> None:
    """A copy of a module has the original's hooks."""
    if not is_own:
        raise StateError(
            f"{unit.name}: a copy of a sharded module has only slices of parameters; build a new module and load the full_state_dict() of "
            "the sharded one into it"
        )
