"""How numbers are packed for the wire in fewer bytes: `Bfloat16Codec` and `BlockwiseInt8Codec`.

[Note: block-wise int8] A flat tensor is cut into blocks of `block` elements, the last one shorter. Each has a float32 scale,
the largest magnitude in it / 127, and each element is sent as round(element / scale), one byte. So an element is wrong by
at most half its block's scale, and an outlier spoils its own block only (block-wise quantization of ZeRO++,
https://arxiv.org/abs/2306.10209). Every packed part begins with its scales, and the codes follow: numel + 4 · blocks bytes.

A block with an infinity or a NaN becomes all NaN: what went wrong is not hidden, and none of its finite elements, which
would all be 0, can be taken for a value. Rounding and scaling are single IEEE operations, so all ranks unpack the same bits.
"""

from abc import ABC, abstractmethod

import torch

Tensor = torch.Tensor
_LARGEST = 127  # symmetric: -128 is not used
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # also of a block of zeros: no division by zero, and no denormal scale


class Codec(ABC):
    """Stateless, so that threads may share one. `str` of it is equal for codecs that understand each other."""

    wire_dtype: torch.dtype

    @abstractmethod
    def size(self, numel: int) -> int:
        """Elements of `wire_dtype` that `numel` packed numbers take."""

    @abstractmethod
    def pack(self, values: Tensor, packed: Tensor) -> None:
        """Write floating `values` [n] into `packed` [size(n)], which shares no memory with them."""

    @abstractmethod
    def unpack(self, packed: Tensor, out: Tensor) -> Tensor:
        """Write what `packed` [size(n)] stands for into floating `out` [n], rounded to its dtype; returns `out`."""

    def mean(self, rows: Tensor, numel: int, ranks: int) -> Tensor:
        """The sum of what each of `rows` [r, size(numel)] stands for, in their order, divided by `ranks`: float32 [numel]."""
        first, *others = rows
        total, contribution = (torch.empty(numel, dtype=torch.float32, device=rows.device) for _ in range(2))
        self.unpack(first, total)
        for row in others:
            total.add_(self.unpack(row, contribution))
        return total.div_(ranks)

    def received(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """What a rank gets that is sent `values` [n], in new memory."""
        packed = torch.empty(self.size(values.numel()), dtype=self.wire_dtype, device=values.device)
        self.pack(values, packed)
        return self.unpack(packed, torch.empty_like(values, dtype=dtype))


class Bfloat16Codec(Codec):
    """Half of float32's bytes: its exponent and 8 bits of its significand."""

    wire_dtype = torch.bfloat16

    def __str__(self) -> str:
        return "bfloat16"

    def size(self, numel: int) -> int:
        return numel

    def pack(self, values: Tensor, packed: Tensor) -> None:
        packed.copy_(values)

    def unpack(self, packed: Tensor, out: Tensor) -> Tensor:
        return out.copy_(packed)


class BlockwiseInt8Codec(Codec):
    """A quarter of float32's bytes and 4 / `block` more; see [Note: block-wise int8]."""

    wire_dtype = torch.uint8

    def __init__(self, block: int) -> None:
        self._block = block  # elements

    def __str__(self) -> str:
        return f"int8 in blocks of {self._block}"

    def size(self, numel: int) -> int:
        return numel + self._scale_bytes(numel)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        values = values.float()
        scale_bytes = self._scale_bytes(values.numel())
        codes = packed[scale_bytes:].view(torch.int8)
        scales = [self._pack_rows(*rows) for rows in zip(self._rows(values), self._rows(codes), strict=True)]
        if scales:
            packed[:scale_bytes].copy_(torch.cat(scales).view(torch.uint8))

    def unpack(self, packed: Tensor, out: Tensor) -> Tensor:
        scale_bytes = self._scale_bytes(out.numel())
        codes = packed[scale_bytes:].view(torch.int8)
        scales = packed[:scale_bytes].clone().view(torch.float32)  # a copy is aligned to its 4 bytes, a view may not be
        taken = 0
        for row_codes, rows in zip(self._rows(codes), self._rows(out), strict=True):
            rows.copy_(row_codes).mul_(scales[taken : taken + len(rows), None])  # torch.mul(..., out=rows) takes twice as long
            taken += len(rows)
        return out

    def _scale_bytes(self, numel: int) -> int:
        return torch.float32.itemsize * -(-numel // self._block)

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """The blocks of a flat tensor as rows: all full ones [count, block], then the shorter one [1, rest]; neither if empty."""
        full = flat.numel() - flat.numel() % self._block
        return [rows for rows in (flat[:full].view(-1, self._block), flat[full:].view(1, -1)) if rows.numel()]

    @staticmethod
    def _pack_rows(rows: Tensor, codes: Tensor) -> Tensor:
        """Write the codes of float32 `rows` [count, width], and return their scales [count]."""
        # not rows.abs().amax(1), which takes six times as long
        scales = torch.maximum(rows.amax(1), -rows.amin(1)).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE)
        quotients = (rows / scales[:, None]).round_()
        if scales.is_cuda or not scales.isfinite().all():  # to ask a GPU would be to wait for it
            quotients.nan_to_num_(0.0)  # a NaN has no defined integer; 0 times such a scale is NaN again
        codes.copy_(quotients)
        return scales
