"""`NodeBuffer`: the result of a gather, shared by all ranks of a node."""

from collections.abc import Callable

import torch


class NodeBuffer:
    """A gathered tensor, which is there once for all ranks of this node if they share memory: see [Note: one buffer a node].

    Use `tensor` until `release`. Only this rank sees what it writes there. The memory is released automatically when neither
    this object nor any tensor over the memory exists any more.
    """

    def __init__(self, tensor: torch.Tensor, on_release: Callable[[bool], object] | None = None) -> None:
        self.tensor = tensor
        self._on_release = on_release

    @property
    def shared(self) -> bool:
        """Whether it lies in memory that the ranks of this node share."""
        return self._on_release is not None

    def release(self, *, keep: bool = True) -> None:
        """Let the memory be used for something else. Once is enough; safe from any thread.

        With `keep` the memory is kept for the next gather, which then need not ask the system for any; without, it is given back to the
        system with the next gather. All ranks of the node must say the same, because the one that keeps the memory decides.
        """
        if self._on_release is not None:
            self._on_release(keep)
