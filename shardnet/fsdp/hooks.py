"""Attaching the runtime to the modules."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardnet.errors import StateError
from shardnet.fsdp.precision import MixedPrecision
from shardnet.fsdp.runtime import Runtime
from shardnet.fsdp.unit import Unit
from shardnet.uncompiled import uncompiled


def attach(unit: Unit, runtime: Runtime, precision: MixedPrecision, *, outermost: bool) -> list[RemovableHandle]:
    """Call the runtime around every forward of the unit's module, and cast what goes in and, if it is the outermost, comes out.

    Autograd's hooks are set by the runtime, forward by forward: on inputs that are cast and on outputs that are not yet, so
    that they enclose what the unit computes. Recomputation within backward casts in the same way. torch.compile compiles what is
    between the hooks.
    """

    @uncompiled
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if module is not unit.module:
            raise StateError(f"{unit.name}: a copy of a sharded module has only slices of parameters; make one from full_state_dict()")
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
