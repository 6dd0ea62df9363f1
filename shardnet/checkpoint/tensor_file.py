"""Writes a safetensors file without slowing the training much: see [Note: past the page cache]. The library reads it.

The format: the length of a header in 8 bytes, the header in JSON, the tensors' bytes one after the other.
Source: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from shardnet.checkpoint.blocks import bytes_of
from shardnet.checkpoint.direct_file import DirectFile
from shardnet.errors import UsageError

Tensor = torch.Tensor
LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the library does not read longer headers
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], rest: Callable[[], None] | None = None) -> bytes:
    """Write contiguous tensors in host memory; returns the file's length and header as they were written, when the disk has all of it.
    Raises OSError, and UsageError for what the format cannot hold.

    rest  called after every few MiB
    """
    header: dict[str, object] = {"__metadata__": metadata}
    # The widest first: each tensor begins at a multiple of its elements' width, so that it can be read in place.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    start = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{name} has dtype {tensor.dtype}, which a safetensors file cannot hold")
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, start + tensor.nbytes)}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > _MOST_HEADER_BYTES:
        raise UsageError(f"{path}: {len(tensors)} tensors are too many for one safetensors file, whose header is limited to 100 MB")
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    with DirectFile(path, rest) as file:
        file.write(head)
        for _, tensor in ordered:
            file.write(bytes_of(tensor))
    return head
