"""Optimizers that sharded parameters are not for."""

from torch import optim

from shardnet.errors import UsageError
from shardnet.fsdp.group import sharded_by

_REFUSED = {
    optim.LBFGS: "its line search takes all parameters as one vector, of which this rank has a part",
    optim.Adafactor: "it looks at rows and columns of a parameter, of which this rank has some elements; use ZeroOptimizer",
}


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Raise UsageError for one that looks beyond single elements, and has sharded parameters: it would do something else on each number of
    ranks."""
    reason = next((reason for refused, reason in _REFUSED.items() if isinstance(optimizer, refused)), None)
    if reason is None:
        return
    for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
        if (unit := sharded_by(parameter)) is not None:
            raise UsageError(f"{type(optimizer).__name__} cannot step what is sharded, such as the parameters of {unit}: {reason}")
