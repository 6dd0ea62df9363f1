"""Optimizers that sharded parameters are not for."""

from typing import Any

from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardnet.errors import UsageError
from shardnet.fsdp.group import sharded_by

_REFUSED = {
    optim.LBFGS: "its line search takes all parameters as one vector, of which this rank has a part",
    optim.Adafactor: "it looks at rows and columns of a parameter, of which this rank has some elements; use ZeroOptimizer",
}
_classes = tuple(_REFUSED)
_watching = False


def watch_optimizers() -> None:
    """From now on a step of such an optimizer on a sharded parameter, of any model in this process, raises UsageError: it would do
    something else on each number of ranks."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_check)
        _watching = True


def _check(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, _classes):  # the rule: torch.compile, which looks in here, knows it beforehand
        return
    for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
        if (unit := sharded_by(parameter)) is not None:
            reason = next(reason for refused, reason in _REFUSED.items() if isinstance(optimizer, refused))
            raise UsageError(f"{type(optimizer).__name__} cannot step what is sharded, such as the parameters of {unit}: {reason}")
