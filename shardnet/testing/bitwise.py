"""Comparing tensors bit for bit: `torch.equal` says that NaN differs from NaN, and that −0.0 is 0.0."""

import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return left.shape == right.shape and left.dtype == right.dtype and bits(left) == bits(right)
