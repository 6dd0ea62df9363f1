"""State as bytes and back: a JSON header that says what is where, and the tensors' bytes. No code in it.

[Note: plain values] JSON has neither tensors nor tuples, and only text as keys. So these become objects of one key that no
other object has: {"tensor": …}, {"tuple": […]} and {"dict": [[key, value], …]}; the last one stands for every plain dict, and OrderedDict
and Counter have keys of their own, so that they come back as what they were. Other classes are refused, since they would come back as
something less.
"""

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.errors import ProtocolError, UsageError

Tensor = torch.Tensor
State = dict[str, Any]  # of one parameter: tensors, numbers, text
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KINDS = {kind: name for name, kind in _MAPPINGS.items()}
_ALIGNMENT = 16  # bytes; a tensor may begin only at a multiple of its item size


@dataclass(frozen=True, slots=True)
class Outline:
    """A value with its tensors taken out."""

    header: bytes  # the value, and in it where each tensor lies in the payload
    tensors: tuple[Tensor, ...]  # as they were given, on any device
    offsets: tuple[int, ...]  # of each tensor in the payload, in bytes
    payload_bytes: int

    @classmethod
    def of(cls, value: Any) -> "Outline":
        """`value` may consist of dicts, lists, tuples, tensors, numbers, text and None. Raises UsageError for anything else."""
        tensors: list[Tensor] = []
        offsets: list[int] = []
        end = 0

        def plain(value: Any) -> Any:
            nonlocal end
            match value:
                case Tensor() if value.layout is torch.strided:
                    tensors.append(value)
                    offsets.append(end)
                    end += value.nbytes + -value.nbytes % _ALIGNMENT
                    dtype = str(value.dtype).removeprefix("torch.")
                    return {"tensor": [dtype, list(value.shape), offsets[-1]]}
                case dict() if type(value) in _KINDS:
                    return {_KINDS[type(value)]: [[plain(key), plain(inner)] for key, inner in value.items()]}
                case list() if type(value) is list:
                    return [plain(inner) for inner in value]
                case tuple() if type(value) is tuple:
                    return {"tuple": [plain(inner) for inner in value]}
                case None | bool() | int() | float() | str():
                    return value
            raise UsageError(
                f"a value of type {type(value).__name__} cannot be kept or sent, "
                f"only tensors, numbers, text and containers of them: {value!r}"
            )

        header = json.dumps(plain(value), separators=(",", ":")).encode()
        return cls(header, tuple(tensors), tuple(offsets), end)

    def views(self, payload: Tensor) -> list[Tensor]:
        """Where each tensor belongs in a payload, uint8 [payload_bytes]."""
        return [
            payload[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(self.offsets, self.tensors, strict=True)
        ]

    def fill(self, payload: Tensor) -> None:
        """Copy the tensors into a payload."""
        for view, tensor in zip(self.views(payload), self.tensors, strict=True):
            view.copy_(tensor.detach())


def encode(value: Any) -> tuple[Tensor, Tensor]:
    """A value as header and payload: uint8, 1-D each. See `Outline.of`."""
    outline = Outline.of(value)
    payload = torch.zeros(outline.payload_bytes, dtype=torch.uint8, device="cpu")
    outline.fill(payload)
    return torch.frombuffer(bytearray(outline.header), dtype=torch.uint8), payload


def decode(header: Tensor, payload: Tensor) -> Any:
    """What `encode` was given. The tensors share the payload's memory. Raises ProtocolError for bytes that `encode` does not make."""
    try:
        return _read(json.loads(header.numpy().tobytes()), payload)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ProtocolError(f"received state that no rank of this version sends, and that cannot be decoded: {error!r}") from error


def _read(plain: Any, payload: Tensor) -> Any:
    if isinstance(plain, list):
        return [_read(inner, payload) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "tensor":
            name, shape, offset = content
            return _tensor(name, shape, offset, payload)
        case "tuple":
            return tuple(_read(inner, payload) for inner in content)
        case "dict" | "ordered" | "counter":
            return _MAPPINGS[kind]({_read(key, payload): _read(inner, payload) for key, inner in content})
    raise ValueError(f"{kind!r} is not a known kind of value")


def _tensor(name: str, shape: list[int], offset: int, payload: Tensor) -> Tensor:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a torch dtype")
    count = torch.Size(shape).numel() * dtype.itemsize
    if not 0 <= offset <= offset + count <= payload.numel():
        raise ValueError(f"a tensor at offset {offset} of {count} bytes lies outside the payload of {payload.numel()} bytes")
    return payload[offset : offset + count].view(dtype).view(shape)
