"""`Split`: how parameters are cut over ranks, and which optimizers allow which cut.

[Note: which split is exact] An optimizer that treats each element separately, as SGD and Adam do, gives the same bits
however the parameters are cut, so it is split evenly, by elements. Others look at a whole parameter: Adafactor at rows
and columns, Muon at the matrix, LARS and LAMB at the norm. They keep their results if each parameter has one owner. So
every class that is not known to be element-wise is split by whole parameters, the largest first, each to the rank that
has the least; one rank then holds at least the largest parameter's state. If you know that a class of another library is
element-wise, ask for `Split.ELEMENTS`. An optimizer that looks at all parameters at once would be wrong under either
split: LBFGS is refused, and D-Adaptation and Prodigy, which cannot be recognised here, must not be used.
"""

from enum import StrEnum
from typing import Any

import torch
from torch import optim

from shardnet.errors import UsageError

OptimizerClass = type[optim.Optimizer]

# Update each element from that element's gradient and state alone, and from counters that are equal everywhere.
_ELEMENT_WISE: frozenset[OptimizerClass] = frozenset(
    (
        optim.ASGD,
        optim.SGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
    )
)
_REFUSED: dict[OptimizerClass, str] = {
    optim.LBFGS: "its line search needs all parameters as one vector, and calls the closure any number of times; use Adam",
    optim.SparseAdam: "it needs sparse gradients, and averaged gradients are dense; use Adam",
}


class Split(StrEnum):
    """What a rank's share of the parameters consists of."""

    ELEMENTS = "elements"  # slices of a flat buffer, equal in size up to one element: for optimizers that look at each element only
    PARAMETERS = "parameters"  # whole parameters in their shape, about equal in total size: for those that look at one parameter


def choose_split(optimizer_class: OptimizerClass, wish: Split | str | None) -> Split:
    """The split for an optimizer. Raises UsageError for a class that no split can serve, and for an unknown wish.

    Unless wished otherwise, torch's element-wise classes are split by elements and every other class by parameters. A
    subclass of an element-wise one may do anything, so it counts as another class.
    """
    given: object = optimizer_class
    if not (isinstance(given, type) and issubclass(given, optim.Optimizer)):
        raise UsageError(f"optimizer_class must be a torch.optim.Optimizer class such as torch.optim.AdamW, got {optimizer_class!r}")
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise UsageError(f"{optimizer_class.__name__} cannot be sharded: {reason}")
    if wish is None:
        return Split.ELEMENTS if optimizer_class in _ELEMENT_WISE else Split.PARAMETERS
    if wish not in list(Split):
        raise UsageError(f"split must be one of {', '.join(Split)}, got {wish!r}")
    return Split(wish)


def defaults_of(optimizer_class: OptimizerClass, options: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters, filled in and checked by the class; raises the class's own error for wrong ones."""
    probe = torch.zeros(1, 1, requires_grad=True, device="cpu")  # a matrix, which is what Muon accepts
    return optimizer_class([probe], **options).defaults
