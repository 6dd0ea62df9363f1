"""`BackwardSteps`: optimizers that step within backward, a group of parameters as soon as its gradients are reduced.

[Note: steps in backward] An optimizer skips parameters that have no gradient. So the caller's own optimizer steps a single group if it is
called when only that group has gradients. Per-parameter optimizers, and all that work with sharded parameters are such, then do the same as
in one step at the end. While the optimizer steps, other gradients are on their way, and reduced gradients of at most one group exist.

The loss may bring gradients of its own to slices ([Note: gradients from elsewhere] in elsewhere.py). During a step those of other
groups are put away, and a gradient for a group that was already stepped comes too late.

Backward still computes with the full buffer, not with the shard that is stepped. But where a rank has all of a group, the shard is the
full buffer; and a unit that forward has used several times may be gathered again. In these two cases gradients are put aside until
backward has ended.
"""

from collections.abc import Iterable, Sequence

import torch

from shardnet.errors import StateError, UsageError
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.optimizers import check_optimizer
from shardnet.fsdp.timeline import OPTIMIZER, Timeline


class BackwardSteps:
    """Steps what a backward has reduced, see [Note: steps in backward]. Used by the training thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[FlatGroup], timeline: Timeline) -> None:
        """Raises UsageError for optimizers of other parameters, or of parameters with gradients already, and for a parameter that no
        optimizer has."""
        self._optimizers = tuple(optimizers)
        self._groups = tuple(groups)
        self._timeline = timeline
        self._stepped: set[FlatGroup] = set()  # or put aside, in the backward that is under way
        self._later: set[FlatGroup] = set()  # stepped only at its end
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # parameters, and their gradients
        self.under_way = False  # an optimizer steps at this moment
        self._check()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer is one of them, or a wrapper around one."""
        return any(optimizer is each or optimizer.param_groups is each.param_groups for each in self._optimizers)

    def postpone(self, groups: Iterable[FlatGroup]) -> None:
        """Step these groups only at the end: the backward that is under way may need them again as they are."""
        self._later.update(groups)

    def reduced(self, group: FlatGroup) -> None:
        """The gradients of a group are there."""
        if group in self._stepped:
            raise StateError(
                f"{group.label} was reduced twice in one backward, as happens when several reentrant checkpoints use it, so it would be "
                "stepped twice: leave step_in_backward() out, or checkpoint with use_reentrant=False"
            )
        self._stepped.add(group)
        if group.computes_with_shard or group in self._later:
            self._aside += [(each, each.grad) for each in group.originals if each.grad is not None]
            _drop_gradients(group)
        else:
            self._step([group])

    def end(self) -> None:
        """All gradients are reduced, and nothing computes any more: step what was put aside. Raises StateError for a gradient that came too
        late."""
        try:
            self._refuse_late_gradients()
            if self._aside:
                for parameter, gradient in self._aside:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                self._step(self._groups)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop everything about this backward and its gradients, before the next one."""
        self._stepped.clear()
        self._later.clear()
        self._aside.clear()
        for group in self._groups:
            _drop_gradients(group)

    def _step(self, groups: Sequence[FlatGroup]) -> None:
        others = [each for group in self._groups if group not in groups for each in group.originals if each.grad is not None]
        gradients = [each.grad for each in others]
        for parameter in others:
            parameter.grad = None
        computing, self.under_way = self._timeline.computing, True
        self._timeline.compute(OPTIMIZER)
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self.under_way = False
            self._timeline.compute(computing)
            for group in groups:
                _drop_gradients(group)
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient

    def _refuse_late_gradients(self) -> None:
        aside = {id(parameter) for parameter, _ in self._aside}
        for group in self._stepped:
            for parameter, name in zip(group.originals, group.names, strict=True):
                if parameter.grad is not None and id(parameter) not in aside:
                    raise StateError(
                        f"the loss uses {name} directly, and that gradient came after the optimizer had stepped the parameter: leave "
                        "step_in_backward() out, or compute this part of the loss in the model's forward"
                    )

    def _check(self) -> None:
        own = {id(parameter): name for group in self._groups for parameter, name in zip(group.originals, group.names, strict=True)}
        held: set[int] = set()
        for optimizer in self._optimizers:
            check_optimizer(optimizer)
            for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
                held.add(id(parameter))
                if id(parameter) not in own:
                    raise UsageError(
                        f"a {type(optimizer).__name__} given to step_in_backward() has a parameter of shape {list(parameter.shape)} that "
                        "this model does not shard: use a separate optimizer for ignored modules and for other models"
                    )
                if parameter.grad is not None:
                    raise UsageError(
                        "parameters have gradients already, which the first step would include: call zero_grad() before step_in_backward()"
                    )
        for parameter in (parameter for group in self._groups for parameter in group.originals):
            if parameter.requires_grad and id(parameter) not in held:
                raise UsageError(
                    f"{own[id(parameter)]} is in none of the optimizers, so backward would drop its gradient without a step: give all "
                    "optimizers of the model to step_in_backward() in one call"
                )


def _drop_gradients(group: FlatGroup) -> None:
    for parameter in group.originals:
        parameter.grad = None
