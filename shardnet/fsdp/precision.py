"""`MixedPrecision`: in which dtypes a model computes and reduces, while its parameters keep their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardnet.collectives.reduction import dtype_name
from shardnet.errors import DtypeError, UsageError
from shardnet.fsdp.tensors import map_tensors

Dtype = torch.dtype
_COMPUTE = (torch.float16, torch.bfloat16, torch.float32)
_ANY_FLOAT = (*_COMPUTE, torch.float64)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of one parameter."""

    master: Dtype  # of the sharded parameter, its gradient and the optimizer's state
    compute: Dtype  # as it is gathered, and as modules see it
    reduce: Dtype  # of its gradient while that is reduced

    def __str__(self) -> str:
        names = [dtype_name(dtype) for dtype in (self.master, self.compute)]
        return names[0] if names[0] == names[1] else f"{names[0]} as {names[1]}"

    @property
    def collect(self) -> Dtype:
        """The dtype that gradients are kept in until they are reduced, which costs them no bits."""
        return torch.promote_types(self.compute, self.reduce)

    @property
    def reduces_as_it_comes(self) -> bool:
        """Whether gradients are collected and reduced in the dtype in which autograd gives them, however many are added up."""
        return self.compute == self.reduce == torch.promote_types(self.compute, torch.float32)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes of one model; the fields of FSDP2's `MixedPrecisionPolicy`. None leaves a dtype as it is.

    Parameters, their gradients and the optimizer state keep the dtype that the module was made with (the masters).
    Gathers carry `param_dtype`, so modules see parameters of that dtype and compute in it, frozen ones included;
    buffers, and parameters that are not floating-point, keep their own. Gradients are reduced over ranks in
    `reduce_dtype`, by default the dtype they come in (FSDP2 since PyTorch 2.15: the parameter's own); sums of 16-bit
    floats are formed in float32 either way, and so are the sums of `no_sync`.
    `cast_forward_inputs` casts floating tensors given to the model, and to each of its units, to `param_dtype`;
    `output_dtype` casts what the model returns. Both reach into lists, dicts, dataclasses and pytrees.

    `param_dtype_override_fn(parameter)` may keep single parameters as they are by returning their own dtype, as batch
    normalisation needs on CPUs; None or `param_dtype` casts as usual. It must give the same answer on all ranks.

    Raises DtypeError for a dtype that is not floating-point, and for a `param_dtype` of float64.
    """

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], Dtype | None] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("param_dtype", _COMPUTE), ("reduce_dtype", _ANY_FLOAT), ("output_dtype", _ANY_FLOAT)):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in allowed:
                raise DtypeError(f"MixedPrecision: {name} must be one of {', '.join(map(str, allowed))}, got {dtype!r}")

    def dtypes(self, name: str, parameter: nn.Parameter) -> Dtypes:
        """The dtypes of one parameter. Raises UsageError where `param_dtype` has more bits than the parameter itself."""
        master = parameter.dtype
        if not master.is_floating_point:
            return Dtypes(master, master, master)
        compute = self._override(name, parameter) or self.param_dtype or master
        if compute.itemsize > master.itemsize:
            raise UsageError(
                f"{name} is {master}, so the wider param_dtype {compute} would send more bytes without more precision; "
                "choose a narrower param_dtype, or convert the module before you shard it, as with module.float()"
            )
        return Dtypes(master, compute, self.reduce_dtype or compute)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a unit's forward, cast."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return args, kwargs
        return _cast(args, self.param_dtype), _cast(kwargs, self.param_dtype)

    def cast_outputs(self, outputs: Any) -> Any:
        """The outputs of the model's forward, cast."""
        return outputs if self.output_dtype is None else _cast(outputs, self.output_dtype)

    def _override(self, name: str, parameter: nn.Parameter) -> Dtype | None:
        override = self.param_dtype_override_fn(parameter) if self.param_dtype_override_fn else None
        if override not in (None, self.param_dtype, parameter.dtype):
            raise UsageError(
                f"param_dtype_override_fn returned {override} for {name}: "
                f"it must return None, param_dtype ({self.param_dtype}) or the parameter's own dtype ({parameter.dtype})"
            )
        return override


def _cast(value: Any, dtype: Dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
