"""Checksums of a tensor's bytes, block by block: whoever reads a part of it can tell whether that part is what was written."""

from collections.abc import Sequence

import torch
from crc32c import crc32c

Tensor = torch.Tensor
BLOCK_BYTES = 2**20


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


def checksums(tensor: Tensor) -> list[int]:
    """CRC-32C of each block; the last one may be shorter. For a contiguous tensor in host memory."""
    data = bytes_of(tensor)
    return [crc32c(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


def is_intact(blocks: Tensor, first: int, sums: Sequence[int]) -> bool:
    """Whether whole blocks, from number `first` on, have the checksums in `sums`."""
    found = checksums(blocks)
    return found == list(sums[first : first + len(found)])
