"""`BackwardSteps`: optimizers that step within backward, a group of parameters as soon as its gradients are reduced.

[Note: steps in backward] An optimizer skips parameters that have no gradient. So the caller's own one steps a single group if it is called
when that one has gradients and no other has, for it has stepped those before: per-parameter optimizers, which those for sharded parameters
are, do the same as in one step at the end. While it steps, other gradients are on their way, and reduced ones of one group at most
are there.

What backward still computes with is the full buffer, and not the shard that is stepped. Where a rank has all of a group, the shard is
the full buffer: then it is stepped when backward has ended.
"""

from collections.abc import Sequence

import torch

from shardnet.errors import StateError, UsageError
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.timeline import OPTIMIZER, Timeline


class BackwardSteps:
    """Steps what a backward has reduced, see [Note: steps in backward]. Used by the training thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[FlatGroup], timeline: Timeline) -> None:
        """Raises UsageError for an optimizer that has parameters of something else, or gradients already."""
        self._optimizers = tuple(optimizers)
        self._timeline = timeline
        self._stepped: set[FlatGroup] = set()  # in the backward that is under way
        self._postponed = False  # some of them will be when it has ended
        own = {id(parameter) for group in groups for parameter in group.originals}
        for optimizer in optimizers:
            for parameter in (parameter for options in optimizer.param_groups for parameter in options["params"]):
                if id(parameter) not in own:
                    raise UsageError(
                        f"a {type(optimizer).__name__} for steps in backward has a parameter of shape {list(parameter.shape)} "
                        "that this model does not shard: give ignored modules, and others, an optimizer of their own"
                    )
                if parameter.grad is not None:
                    raise UsageError("there are gradients already, which the first step would take for its own: call zero_grad() before")

    def reduced(self, group: FlatGroup) -> None:
        """The gradients of a group are there."""
        if group in self._stepped:
            raise StateError(
                f"{group.label} was reduced twice in one backward, as where several reentrant checkpoints use it, and would be stepped "
                "twice: leave step_in_backward() out, or checkpoint with use_reentrant=False"
            )
        self._stepped.add(group)
        if group.computes_with_shard:
            self._postponed = True
        else:
            self._step(group)

    def end(self) -> None:
        """All gradients are, and nothing computes any more."""
        if self._postponed:
            self._step(*self._stepped)
        self.forget()

    def forget(self) -> None:
        """The next backward is another one."""
        self._stepped.clear()
        self._postponed = False

    def _step(self, *groups: FlatGroup) -> None:
        computing = self._timeline.computing
        self._timeline.compute(OPTIMIZER)
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self._timeline.compute(computing)
        for group in groups:
            for parameter in group.originals:
                parameter.grad = None
