"""Attaching the runtime to the modules."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardnet.errors import StateError
from shardnet.fsdp.runtime import Runtime
from shardnet.fsdp.unit import Unit


def attach(unit: Unit, runtime: Runtime) -> list[RemovableHandle]:
    """Call the runtime around every forward of the unit's module. Autograd's hooks are set there, forward by forward."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not unit.module:
            raise StateError(f"{unit.name}: a copy of a sharded module has only slices of parameters; make one from full_state_dict()")
        runtime.before_forward(unit, (args, kwargs))

    def after(_: nn.Module, __: tuple[Any, ...], outputs: object) -> None:
        runtime.after_forward(unit, outputs)

    return [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, always_call=True),  # also when forward raises: nothing stays gathered
    ]
