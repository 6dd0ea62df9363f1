"""Checks of what `FSDP` is given, and the errors for what cannot be sharded."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardnet.backend import Backend
from shardnet.collectives.reduction import dtype_name
from shardnet.errors import DtypeError, UsageError
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.group import sharded_by
from shardnet.fsdp.ignored import IgnoredModules
from shardnet.fsdp.precision import MixedPrecision
from shardnet.sharding.overlap import refuse_overlaps


def check_kinds(module: object, backend: object, prefetch: object, mixed_precision: object, compression: object) -> None:
    """Raise UsageError for an argument of the wrong kind."""
    if not isinstance(backend, Backend):
        raise UsageError(f"backend must be a Backend, such as `cluster.backend`, got a value of type {type(backend).__name__}")
    if not isinstance(module, nn.Module):
        raise UsageError(f"only an nn.Module can be sharded, got a value of type {type(module).__name__}")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise UsageError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")
    if not isinstance(mixed_precision, MixedPrecision | None):
        raise UsageError(f"mixed_precision must be a MixedPrecision, such as MixedPrecision(torch.bfloat16), got {mixed_precision!r}")
    if not isinstance(compression, Compression | None):
        raise UsageError(f"compression must be a Compression, such as Compression(weights='int8', gradients='int8'), got {compression!r}")


def check_parameters(module: nn.Module, ignored: IgnoredModules) -> None:
    """Raise UsageError for a parameter that cannot be sharded."""
    for name, parameter in module.named_parameters():
        if (unit := sharded_by(parameter)) is not None:
            raise UsageError(f"{name} is sharded already, in {unit} of another FSDP model; models cannot share parameters")
        if parameter in ignored.parameters:
            continue
        if is_lazy(parameter):
            raise UsageError(f"{name} is a lazy parameter without a shape: call the module once on an example input before you shard it")
        if parameter.is_complex():
            raise DtypeError(
                f"{name} is {dtype_name(parameter.dtype)}, and complex parameters cannot be sharded: store it as real numbers "
                "(torch.view_as_real), or put its module into ignored_modules"
            )
    sharded: dict[Tensor, str] = {each: name for name, each in module.named_parameters() if each not in ignored.parameters}
    for name, buffer in module.named_buffers():
        if buffer in sharded:
            raise UsageError(
                f"the parameter {sharded[buffer]} is also the buffer {name}, which would be this rank's slice of it: register it once, or "
                "put its modules into ignored_modules"
            )
    refuse_overlaps((name, parameter) for parameter, name in sharded.items())
