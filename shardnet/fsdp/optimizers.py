"""Optimizers that sharded parameters are not for."""

import torch
from torch import optim

from shardnet.errors import StateError, UsageError
from shardnet.fsdp.group import sharded_by

_REFUSED = {
    optim.LBFGS: "its line search takes all parameters as one vector, of which this rank has a part",
    optim.Adafactor: "it looks at rows and columns of a parameter, of which this rank has some elements; use ZeroOptimizer",
    optim.SparseAdam: "gradients of what is sharded are dense; use ZeroOptimizer",
    optim.Muon: "it looks at a parameter as a matrix, of which this rank has some elements; use ZeroOptimizer",
}


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that looks beyond single elements and has sharded parameters: its result would depend on the
    number of ranks."""
    reason = next((reason for refused, reason in _REFUSED.items() if isinstance(optimizer, refused)), None)
    if reason is None:
        return
    for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
        if (unit := sharded_by(parameter)) is not None:
            raise UsageError(f"{type(optimizer).__name__} cannot step what is sharded, such as the parameters of {unit}: {reason}")


def check_state(optimizer: optim.Optimizer) -> None:
    """Raise StateError for state of another shape than the slice that it belongs to. For use after a step that has failed."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape and (unit := sharded_by(parameter)):
                raise StateError(
                    f"the state {name!r} of a parameter of {unit} has shape {list(value.shape)}, and this rank's slice has "
                    f"{list(parameter.shape)}: it is of the whole parameter, or another rank's. shardnet.checkpoint saves and loads "
                    "states for any number of ranks; what an optimizer's state_dict() gives is one rank's own"
                )
