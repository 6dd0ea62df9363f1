"""`Elsewhere`: gradients that a loss brings to parameters themselves, where other ranks have the same parameters.

[Note: gradients from elsewhere] A loss may be computed with parameters themselves, such as a penalty of their size. Autograd puts such
gradients on the slices, beside what is reduced: the ranks' slices add up to the whole. Where a rank has all of a group, other ranks have
the same parameters and may have other gradients for them, so these are averaged with the rest. They are taken on their way to the
parameter, and put to what forward's leaves have got.
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
    """Those of one group; lives as long as it, and does nothing for parameters that it is not told to watch."""

    def __init__(self, take: Take) -> None:
        self._take = take  # what comes
        # by number: where autograd brings a parameter's gradients, and hooks there, which live as long as that
        self._watched: dict[int, tuple[Node, RemovableHandle, RemovableHandle]] = {}
        self._hooked: dict[int, bool] = {}  # whether all that has come for a parameter has been through its hooks, by autograd

    def expects(self, index: int) -> bool:
        """Whether the backward that runs now brings this parameter one."""
        return torch._C._will_engine_execute_node(self._watched[index][0])

    @property
    def expected(self) -> list[int]:
        """The parameters to which it brings one."""
        return [index for index in self._watched if self.expects(index)]

    def watch(self, index: int, name: str, parameter: nn.Parameter) -> None:
        """Take what autograd brings to a parameter from now on, frozen or not. Hooks of the program's get what is reduced, once."""
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
            return (None,)  # so that autograd puts it nowhere

        def restore(*_: object) -> None:
            if postponed:
                parameter._post_accumulate_grad_hooks.update(postponed)
                postponed.clear()

        frozen = not parameter.requires_grad
        node = get_gradient_edge(parameter.requires_grad_()).node
        parameter.requires_grad_(not frozen)
        self._watched[index] = node, node.register_prehook(collect), node.register_hook(restore)

    def stop(self) -> None:
        """The parameters are nobody's but the program's again."""
        while self._watched:
            for handle in self._watched.popitem()[1][1:]:
                handle.remove()

    def note_forward(self, index: int) -> None:
        """A gradient of what forward has computed has come for a parameter, which hooks have not seen."""
        if self._watched:
            self._hooked[index] = False

    def take_hooked(self, index: int) -> bool:
        """Whether hooks have seen all that has come for a parameter, which is reduced now."""
        return self._hooked.pop(index, False)

    def forget(self) -> None:
        """What has come is dropped."""
        self._hooked.clear()
