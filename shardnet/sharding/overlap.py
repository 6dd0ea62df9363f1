"""Parameters that share memory without being the same parameter."""

from collections.abc import Iterable

import torch

from shardnet.errors import UsageError

Tensor = torch.Tensor


def refuse_overlaps(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError for two parameters with memory in common: sharding would give each its own memory.

    An overlap with a parameter that is not contiguous is found only if both begin at the same address.
    """
    held = [(parameter.data_ptr(), name, parameter) for name, parameter in named if parameter.numel() and parameter.device.type != "meta"]
    held = sorted((entry for entry in held if entry[0]), key=lambda entry: entry[0])  # 0: a wrapper, which has no memory of its own
    begun, begins = -1, ""  # where the previous parameter begins, and its name
    until, ends = -1, ""  # where the last contiguous parameter before ends, and its name
    for start, name, parameter in held:
        if start == begun or (start < until and parameter.is_contiguous()):
            raise UsageError(
                f"{name} and {begins if start == begun else ends} are two parameters that share memory, and would no longer share it once "
                "they are sharded: tie them by having both modules hold one nn.Parameter (decoder.weight = encoder.weight)"
            )
        begun, begins = start, name
        if parameter.is_contiguous():
            until, ends = start + parameter.nbytes, name
