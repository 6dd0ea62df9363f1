"""Views of contiguous tensors over the same memory, flat or as bytes."""

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
    """Copy into a flat part of a result, which may overlap `source`, or be the same memory."""
    if source.data_ptr() != target.data_ptr() and source.numel():
        overlaps = source.data_ptr() < target.data_ptr() + target.nbytes and target.data_ptr() < source.data_ptr() + source.nbytes
        target.copy_((source.clone() if overlaps else source).view(-1))
