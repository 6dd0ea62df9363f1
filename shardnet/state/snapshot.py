"""`Snapshot`: a value as it was at some moment, tensors and all, in one piece of memory."""

from typing import Any

import torch

from shardnet.zero.codec import Outline, decode

Tensor = torch.Tensor


class Snapshot:
    """A copy of a value in host memory; the next copy reuses the memory if it has the same sizes."""

    def __init__(self) -> None:
        self.header = torch.empty(0, dtype=torch.uint8, device="cpu")  # both in the format of `shardnet.zero.codec`
        self.payload = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[Tensor] = []
        self._text = b""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes + self.payload.nbytes

    @torch.no_grad()
    def take(self, value: Any) -> bool:
        """Copy a value. True if its header differs from that of the value before. Raises UsageError as `Outline.of` does."""
        outline = Outline.of(value)
        changed = outline.header != self._text
        if changed:
            self._text = b""  # if there is no memory for this value, the next one must not take what is here for its own
            self.prepare(len(outline.header), outline.payload_bytes)
            self.header.copy_(torch.frombuffer(bytearray(outline.header), dtype=torch.uint8))
            self._views = outline.views(self.payload)
            self._text = outline.header
        for view, tensor in zip(self._views, outline.tensors, strict=True):
            view.copy_(tensor)
        return changed

    def prepare(self, header_bytes: int, payload_bytes: int) -> None:
        """Have memory of these sizes; its content is undefined until the caller fills it."""
        if self.header.numel() != header_bytes:
            self.header = torch.empty(header_bytes, dtype=torch.uint8, device="cpu")
        if self.payload.numel() != payload_bytes:
            self.payload = torch.empty(payload_bytes, dtype=torch.uint8, device="cpu")

    def value(self) -> Any:
        """The value it holds; the tensors are views of its memory."""
        return decode(self.header, self.payload)
