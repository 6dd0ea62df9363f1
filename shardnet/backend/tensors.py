"""Contiguous tensors as others need them, over the same memory."""

import torch

from shardnet.collectives.hierarchical import Bounds

Tensor = torch.Tensor


def flat(tensor: Tensor) -> Tensor:
    """[d0, …] → [elements]."""
    return tensor.view(-1)


def raw(tensor: Tensor) -> Tensor:
    """[d0, …] → its bytes, flat."""
    return tensor.view(-1).view(torch.uint8)


def in_bytes(bounds: Bounds, tensor: Tensor) -> Bounds:
    """Bounds in elements of a tensor as bounds in bytes."""
    return [(start * tensor.itemsize, end * tensor.itemsize) for start, end in bounds]


def put(source: Tensor, target: Tensor) -> None:
    """Copy into a flat part of a result that may overlap what it is copied from, or be that."""
    if source.data_ptr() != target.data_ptr() and source.numel():
        overlaps = source.data_ptr() < target.data_ptr() + target.nbytes and target.data_ptr() < source.data_ptr() + source.nbytes
        target.copy_((source.clone() if overlaps else source).view(-1))
