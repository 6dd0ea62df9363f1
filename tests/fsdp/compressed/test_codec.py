"""Packing numbers: how many bytes they take, how large the errors are, and that infinities and NaNs stay visible."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardnet.fsdp.compressed.codec import Bfloat16Codec, BlockwiseInt8Codec, Codec

Tensor = torch.Tensor
CODECS = [Bfloat16Codec(), BlockwiseInt8Codec(16), BlockwiseInt8Codec(256)]
MAGNITUDES = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)
VALUES = arrays.arrays(np.float32, st.integers(0, 70), elements=MAGNITUDES)
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def received(codec: Codec, values: Tensor) -> Tensor:
    return codec.received(values, values.dtype)


def blocks(values: Tensor, block: int) -> list[Tensor]:
    return list(torch.split(values, block)) if values.numel() else []


@given(VALUES, st.integers(16, 40))
def test_an_element_is_wrong_by_at_most_half_its_blocks_scale(values: np.ndarray, block: int) -> None:
    exact = torch.from_numpy(values)
    for before, after in zip(blocks(exact, block), blocks(received(BlockwiseInt8Codec(block), exact), block), strict=True):
        scale = max(before.abs().max().item() / 127, SMALLEST_SCALE)
        assert (after - before).abs().max().item() <= scale * (0.5 + 1e-4)


@given(VALUES)
def test_bfloat16_keeps_eight_bits(values: np.ndarray) -> None:
    exact = torch.from_numpy(values)
    torch.testing.assert_close(received(Bfloat16Codec(), exact), exact, rtol=2.0**-8, atol=2.0**-133)


@given(VALUES, st.sampled_from(CODECS), st.integers(0, 7))
def test_parts_may_lie_anywhere_in_what_is_sent(values: np.ndarray, codec: Codec, offset: int) -> None:
    exact = torch.from_numpy(values)
    whole = torch.zeros(offset + codec.size(len(exact)) + 3, dtype=codec.wire_dtype)
    packed = whole[offset : offset + codec.size(len(exact))]
    codec.pack(exact, packed)
    assert torch.equal(codec.unpack(packed, torch.empty_like(exact)), received(codec, exact))
    assert not whole[:offset].any()
    assert not whole[len(whole) - 3 :].any()


@given(VALUES, st.integers(16, 40), st.sampled_from([math.inf, -math.inf, math.nan]), st.data())
def test_a_block_that_is_not_finite_comes_out_so_and_no_other(values: np.ndarray, block: int, planted: float, data: st.DataObject) -> None:
    exact = torch.from_numpy(values)
    if not len(exact):
        return
    place = data.draw(st.integers(0, len(exact) - 1))
    clean = blocks(received(BlockwiseInt8Codec(block), exact), block)
    exact[place] = planted
    for index, after in enumerate(blocks(received(BlockwiseInt8Codec(block), exact), block)):
        if index == place // block:
            assert after.isnan().all()
        else:
            assert torch.equal(after, clean[index])


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
def test_bfloat16_keeps_what_is_not_finite(planted: float) -> None:
    torch.testing.assert_close(received(Bfloat16Codec(), torch.tensor([planted, 1.0])), torch.tensor([planted, 1.0]), equal_nan=True)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_float_is_packed_and_unpacked(codec: Codec, source: torch.dtype, target: torch.dtype) -> None:
    values = torch.linspace(-1, 1, 300).to(source)
    result = codec.received(values, target)
    assert result.dtype == target
    torch.testing.assert_close(result.double(), values.double(), rtol=0, atol=0.01)


def test_zeros_come_out_as_zeros() -> None:
    for codec in CODECS:
        assert torch.equal(received(codec, torch.zeros(40)), torch.zeros(40))


def test_what_is_representable_comes_out_as_it_is() -> None:
    exact = torch.arange(-127.0, 128.0)
    assert torch.equal(received(BlockwiseInt8Codec(256), exact), exact)


@pytest.mark.parametrize(("block", "share"), [(64, 0.2657), (256, 0.2540), (1024, 0.2510)])
def test_a_quarter_of_the_bytes_and_the_scales(block: int, share: float) -> None:
    codec = BlockwiseInt8Codec(block)
    assert codec.size(10**6) * codec.wire_dtype.itemsize / (4 * 10**6) == pytest.approx(share, abs=1e-4)
    assert [codec.size(numel) for numel in (0, 1, block, block + 1)] == [0, 5, block + 4, block + 9]
