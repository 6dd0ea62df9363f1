"""Optimizers that sharded parameters are not for."""

import torch
from torch import optim

from shardnet.errors import StateError, UsageError
from shardnet.fsdp.group import sharded_by

_REFUSED = {
    optim.LBFGS: "its line search needs all parameters as one vector, and each rank has only a part of it; use Adam",
    optim.Adafactor: "it needs whole rows and columns of a parameter, and each rank has only some elements; use ZeroOptimizer without FSDP",
    optim.SparseAdam: "it needs sparse gradients, and gradients of sharded parameters are dense; use Adam",
    optim.Muon: "it needs a parameter as a whole matrix, and each rank has only some elements; use ZeroOptimizer without FSDP",
}


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that looks beyond single elements and has sharded parameters: its result would depend on the
    number of ranks."""
    reason = next((reason for refused, reason in _REFUSED.items() if isinstance(optimizer, refused)), None)
    if reason is None:
        return
    for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
        if (unit := sharded_by(parameter)) is not None:
            raise UsageError(f"{type(optimizer).__name__} cannot step sharded parameters, such as those of {unit}: {reason}")


def check_state(optimizer: optim.Optimizer) -> None:
    """Raise StateError for state of another shape than the slice that it belongs to. For use after a step that has failed."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape and (unit := sharded_by(parameter)):
                raise StateError(
                    f"the optimizer state {name!r} of a parameter of {unit} has shape {list(value.shape)}, but this rank's slice has shape "
                    f"{list(parameter.shape)}: the state belongs to the whole parameter or to another rank. An optimizer's state_dict() "
                    "holds the state of one rank only; save and load with shardnet.checkpoint, which works with any number of ranks"
                )
