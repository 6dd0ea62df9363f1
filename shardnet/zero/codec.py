"""Optimizer state as bytes and back: a JSON header that says what is where, and the tensors' bytes. No code in it."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardnet.errors import ProtocolError, UsageError

Tensor = torch.Tensor
State = dict[str, Any]  # of one parameter: tensors, numbers, text
_ALIGNMENT = 16  # bytes; a tensor may begin only at a multiple of its item size


def encode(states: Mapping[int, State]) -> tuple[Tensor, Tensor]:
    """The states of some parameters as header and payload: uint8, 1-D each. Raises UsageError for values of other kinds."""
    header: dict[str, dict[str, Any]] = {}
    payload: list[Tensor] = []
    offset = 0
    for index, state in states.items():
        entries = header.setdefault(str(index), {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                entries[key] = {"value": value}
                continue
            entries[key] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "offset": offset}
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            payload += [data, torch.zeros(-data.numel() % _ALIGNMENT, dtype=torch.uint8)]
            offset += data.numel() + payload[-1].numel()
    try:
        text = json.dumps(header).encode()
    except TypeError as error:
        raise UsageError(f"the optimizer's state holds what cannot be sent (only tensors, numbers and text can): {error}") from error
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.cat(payload) if payload else torch.empty(0, dtype=torch.uint8)


def decode(header: Tensor, payload: Tensor) -> dict[int, State]:
    """What `encode` was given. The tensors share the payload's memory. Raises ProtocolError for anything else."""
    try:
        entries = json.loads(header.numpy().tobytes())
        return {int(index): {key: _value(entry, payload) for key, entry in state.items()} for index, state in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"received optimizer state that no rank of this version sends: {error!r}") from error


def _value(entry: Mapping[str, Any], payload: Tensor) -> Any:
    if "value" in entry:
        return entry["value"]
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no dtype")
    count = torch.Size(entry["shape"]).numel() * dtype.itemsize
    return payload[entry["offset"] :][:count].view(dtype).view(entry["shape"])
