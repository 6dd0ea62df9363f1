"""`Elsewhere`: gradients of a loss that reads parameters directly, where other ranks have the same parameters.

[Note: gradients from elsewhere] A loss may read the parameters directly, as a penalty on their size does. Autograd puts such gradients
on the slices, beside the reduced ones, which is right, since the ranks' slices together are the whole. Where a rank has all of a group,
other ranks have the same parameters and may have other gradients for them, so these gradients are averaged with the rest: they are taken
on their way to the parameter and added to those that forward's leaves have got.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardnet.errors import StateError

Tensor = torch.Tensor
Take = Callable[[int, Tensor], object]  # a parameter's number, and its gradient


class Elsewhere:
    """The gradients from elsewhere of one group. Lives as long as the group, and does nothing for parameters that it is not told to
    watch."""

    def __init__(self, take: Take) -> None:
        self._take = take  # is given each gradient that comes
        # by a parameter's number: the graph node that gets its gradients, and the hooks there, which live as long as the node
        self._watched: dict[int, tuple[Node, RemovableHandle, RemovableHandle]] = {}
        self._hooked: dict[int, bool] = {}  # by number: whether autograd has run the parameter's hooks on all gradients that have come

    def expects(self, index: int) -> bool:
        """Whether the backward that runs now brings this parameter a gradient from elsewhere."""
        return torch._C._will_engine_execute_node(self._watched[index][0])

    @property
    def expected(self) -> list[int]:
        """The parameters to which the backward that runs now brings one."""
        return [index for index in self._watched if self.expects(index)]

    def watch(self, index: int, name: str, parameter: nn.Parameter) -> None:
        """From now on take what autograd brings to a parameter, frozen or not. The program's own hooks are given the reduced gradient,
        once."""
        postponed: dict[int, Any] = {}

        def collect(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if (gradient := gradients[0]) is None:
                return None
            if torch.is_grad_enabled():
                raise StateError(f"{name}: backward(create_graph=True) is not supported for sharded parameters")
            self._hooked.setdefault(index, True)
            self._take(index, gradient.detach())
            if hooks := parameter._post_accumulate_grad_hooks:
                postponed.update(hooks)
                hooks.clear()
            return (None,)  # so that autograd accumulates nothing

        def restore(*_: object) -> None:
            if postponed:
                parameter._post_accumulate_grad_hooks.update(postponed)
                postponed.clear()

        frozen = not parameter.requires_grad
        node = get_gradient_edge(parameter.requires_grad_()).node
        parameter.requires_grad_(not frozen)
        self._watched[index] = node, node.register_prehook(collect), node.register_hook(restore)

    def stop(self) -> None:
        """Stop watching: the parameters belong to the program alone again."""
        while self._watched:
            for handle in self._watched.popitem()[1][1:]:
                handle.remove()

    def note_forward(self, index: int) -> None:
        """Note that a parameter has got a gradient through forward's leaf, which its hooks have not seen."""
        if self._watched:
            self._hooked[index] = False

    def take_hooked(self, index: int) -> bool:
        """Whether a parameter's hooks have seen all gradients that have come for it; they are reduced now."""
        return self._hooked.pop(index, False)

    def forget(self) -> None:
        """Forget which gradients have come: they are dropped."""
        self._hooked.clear()
