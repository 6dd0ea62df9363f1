"""Values as frames of bytes between a test and its processes: tensors, numbers, text and containers of them. They contain no code."""

from typing import Any

import torch

from shardnet.zero.codec import decode, encode


def frames_of(value: object) -> tuple[bytes, bytes]:
    """Header and payload. Raises UsageError for a value that cannot be sent."""
    header, payload = encode(value)
    return header.numpy().tobytes(), payload.numpy().tobytes()


def value_of(header: bytes, payload: bytes) -> Any:
    """The value that `frames_of` got, with tensors that have their own memory."""
    return decode(_tensor(header), _tensor(payload))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
