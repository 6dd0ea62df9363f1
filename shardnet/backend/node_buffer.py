"""`NodeBuffer`: what a gather brings to all ranks of a node at once."""

from collections.abc import Callable

import torch


class NodeBuffer:
    """A gathered tensor, once for all ranks of this node where these share memory: see [Note: one buffer a node].

    Whoever has it may use `tensor` until `release`. What is written to it, only this rank sees. It is released by itself when
    neither it nor any tensor over its memory is there any more.
    """

    def __init__(self, tensor: torch.Tensor, on_release: Callable[[bool], object] | None = None) -> None:
        self.tensor = tensor
        self._on_release = on_release

    @property
    def shared(self) -> bool:
        """Whether other ranks have it in the same memory."""
        return self._on_release is not None

    def release(self, *, keep: bool = True) -> None:
        """The memory may be used for something else. Once is enough; safe from any thread.

        With `keep` it waits for the next gather, which then need not ask the system for some; without, if all ranks say so, it is given
        back with the next gather.
        """
        if self._on_release is not None:
            self._on_release(keep)
