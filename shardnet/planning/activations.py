"""Measuring what a forward keeps for backward, without memory and without computing it.

[Note: fake tensors] The forward runs on torch's fake tensors: they have a shape, a dtype and a device, but no content. The
meta device alone is not enough: there torch takes another path through attention, which keeps the whole T×T matrix of
scores, and tensors that a forward makes itself would be on another device than the parameters.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from shardnet.errors import UsageError

Tensor = torch.Tensor


def activation_bytes(module: nn.Module, inputs: Sequence[Tensor]) -> int:
    """The bytes that autograd saves in one forward on the CPU, each storage once; parameters and buffers, which exist
    anyway, are left out. Module and inputs may be on the meta device: only shapes and dtypes count. What activation
    checkpointing keeps by itself is not counted.

    Raises UsageError if forward cannot run on these inputs.
    """
    with FakeTensorMode():
        state = {name: _fake(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        known = {_key(tensor) for tensor in state.values()}
        saved: dict[int, Tensor] = {}  # keeps them alive, so that no storage gets the key of another

        def keep(tensor: Tensor) -> Tensor:
            if _key(tensor) not in known:
                saved.setdefault(_key(tensor), tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad(), _told_once():
            try:
                torch.func.functional_call(module, state, tuple(_fake(tensor) for tensor in inputs))
            except Exception as error:
                shapes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in inputs)
                said = " ".join(str(error).split())
                raise UsageError(f"forward failed on input {shapes}: {type(error).__name__}: {said}") from error
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@contextmanager
def _told_once() -> Iterator[None]:
    """Silence the fake mode's log: it logs an error with a traceback, besides raising it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor of the same shape and dtype; call it within a fake mode."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
