"""One rank's file of a checkpoint: safetensors, with an index in its metadata.

A tensor's name says what it is, "0/layers.0.weight[0:4096].exp_avg": part, parameter, its elements, and the optimizer's key. Values
that are no tensors, and the rank's own state, are encoded with `shardnet.zero.codec`. The checksums in the index are those of the
tensors' blocks (blocks.py); the checksum of the header, which is in the manifest, covers the index too.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from crc32c import crc32c
from safetensors import SafetensorError, safe_open

from shardnet.checkpoint.blocks import BLOCK_BYTES, checksums, is_intact
from shardnet.checkpoint.tensor_file import LENGTH_BYTES, write_tensors
from shardnet.errors import CheckpointError, ProtocolError, UsageError
from shardnet.state import Piece, Span
from shardnet.zero.codec import decode, encode

Tensor = torch.Tensor
_INDEX = "shardnet"  # the metadata's key


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest knows of a file."""

    name: str
    size: int  # bytes
    header_crc32c: int


def write_rank_file(
    path: Path, checkpoint: str, pieces: list[Piece], values: Mapping[str, Any], rest: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write pieces, and values by name; returns when the disk has them. Tensors must be in host memory. Raises
    OSError, and UsageError for what no file can hold.

    checkpoint  its id, without which the files of two checkpoints of one step could be taken for each other
    rest        called again and again, so that the caller can do something else in between
    """
    tensors: dict[str, Tensor] = {}
    encoded: dict[str, str] = {}

    def put(name: str, value: Any) -> None:
        header, payload = encode(value)
        encoded[name] = header.numpy().tobytes().decode()
        if payload.numel():
            tensors[name] = payload

    entries = []
    for piece in pieces:
        label = _label(piece.span)
        of_tensors = {key: value for key, value in piece.state.items() if isinstance(value, Tensor)}
        tensors.update((f"{label}.{key}", value) for key, value in of_tensors.items())
        if others := {key: value for key, value in piece.state.items() if key not in of_tensors}:
            put(label, others)
        entries.append([piece.span.name, piece.span.start, piece.span.stop, list(of_tensors)])
    for name, value in values.items():
        put(name, value)
    blocks = {}
    for name, tensor in tensors.items():
        blocks[name] = checksums(tensor)
        rest()
    index = {"checkpoint": checkpoint, "pieces": entries, "values": encoded, "blocks": blocks}
    header = write_tensors(path, tensors, {_INDEX: json.dumps(index, separators=(",", ":"))}, rest)
    return FileEntry(path.name, path.stat().st_size, crc32c(header))


class RankFile:
    """A file to read from; open for as long as this object lives. What it returns is what was written; otherwise it raises
    CheckpointError."""

    def __init__(self, folder: Path, entry: FileEntry, checkpoint: str) -> None:
        self._path = folder / entry.name
        try:
            self._check_header(entry)
            self._file = safe_open(self._path, framework="pt")
            index = json.loads(self._file.metadata()[_INDEX])
        except (OSError, SafetensorError, ValueError) as error:
            raise self._broken(str(error)) from error
        if index["checkpoint"] != checkpoint:
            raise self._broken(f"it belongs to checkpoint {index['checkpoint']} and not to {checkpoint}")
        self._keys: dict[Span, list[str]] = {Span(name, start, stop): keys for name, start, stop, keys in index["pieces"]}
        self._values: dict[str, str] = index["values"]
        self._blocks: dict[str, list[int]] = index["blocks"]

    def piece(self, whole: Span, start: int, stop: int, *, only: str | None = None) -> Piece:
        """The elements [start, stop) of a parameter, of the piece `whole` that the file has. Of tensors with one entry for each element
        only these entries are read; with `only`, only that key of the state. Raises UsageError for state that cannot be cut."""
        label, cut = _label(whole), Span(whole.name, start, stop)
        keys = self._look_up(whole) if only is None else [only]
        state = {key: self._tensor(f"{label}.{key}", key, whole, cut) for key in keys}
        return Piece(cut, state | (self.value(label) if label in self._values and only is None else {}))

    def value(self, name: str) -> Any:
        """The value that was written under a name."""
        text = bytearray(self._values[name].encode())
        payload = self._read(name) if name in self._blocks else torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            return decode(torch.frombuffer(text, dtype=torch.uint8), payload)
        except ProtocolError as error:
            raise self._broken(str(error)) from error

    def check(self, spans: Iterable[Span]) -> None:
        """Read all of it. Raises CheckpointError unless it is what was written, and has these spans."""
        for span in spans:
            self._look_up(span)
        for name in self._blocks:
            self._read(name)

    def _look_up(self, span: Span) -> list[str]:
        """The keys of what the file has of a span."""
        if span not in self._keys:
            raise self._broken(f"it lacks {_label(span)}, which the manifest lists for it")
        return self._keys[span]

    def _check_header(self, entry: FileEntry) -> None:
        """Check the header before anything in it is used."""
        size = self._path.stat().st_size
        if size != entry.size:
            raise self._broken(f"it has {size} bytes, expected {entry.size}")
        with self._path.open("rb") as file:
            header = file.read(LENGTH_BYTES)
            header += file.read(min(int.from_bytes(header, "little"), size))
        if crc32c(header) != entry.header_crc32c:
            raise self._broken("its header is not the one that was written")

    def _tensor(self, name: str, key: str, whole: Span, cut: Span) -> Tensor:
        shape = self._slice(name).get_shape()
        count = torch.Size(shape).numel()
        if cut == whole or not shape:
            return self._read(name)
        if count != whole.numel:
            raise UsageError(
                f"the optimizer's {key} of {whole.name} has {count} elements for a slice of {whole.numel}: the optimizer does not treat "
                "each element by itself, so its state can be loaded only where the parameter is sliced as it was when it was saved"
            )
        if len(shape) > 1:
            return self._read(name).reshape(-1)[cut.start - whole.start : cut.stop - whole.start]
        return self._read_part(name, cut.start - whole.start, cut.stop - whole.start)

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise self._broken(str(error)) from error
        if not is_intact(tensor, 0, self._blocks[name]):
            raise self._broken(f"the bytes of {name} are not those that were written")
        return tensor

    def _read_part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor of one dimension, out of the blocks in which they lie."""
        source = self._slice(name)
        per_block = BLOCK_BYTES // source[:0].element_size()
        first = start // per_block
        blocks: Tensor = source[first * per_block : min(-(-stop // per_block) * per_block, source.get_shape()[0])]
        if not is_intact(blocks, first, self._blocks[name]):
            raise self._broken(f"the bytes of {name} are not those that were written")
        return blocks[start - first * per_block : stop - first * per_block]

    def _slice(self, name: str) -> Any:
        try:
            return self._file.get_slice(name)
        except SafetensorError as error:
            raise self._broken(str(error)) from error

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be used: {why}")


def _label(span: Span) -> str:
    return f"{span.name}[{span.start}:{span.stop}]"
