"""Chunks as bytes: they are what protobuf itself writes, nothing else is accepted, and no damage goes unnoticed."""

import itertools
import random

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from shardnet import wire
from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.wire import Buffer, Chunk, decode

U32, U64 = 2**32 - 1, 2**64 - 1
ANNOUNCEMENT = mesh_pb2.Control(announcement=mesh_pb2.Announcement(signature="all_gather(float32 [4])", send_bytes=16, expect_bytes=8))
HEAD_BYTES = 42
ALIGNMENT = 16

controls = st.one_of(
    st.none(),
    st.builds(
        lambda signature, sends, expects: mesh_pb2.Control(
            announcement=mesh_pb2.Announcement(signature=signature, send_bytes=sends, expect_bytes=expects)
        ),
        st.text(max_size=200),
        st.integers(0, U64),
        st.integers(0, U64),
    ),
    st.builds(
        lambda detail, ranks: mesh_pb2.Control(abort=mesh_pb2.Abort(reason=mesh_pb2.Abort.LOST, detail=detail, ranks=ranks)),
        st.text(max_size=200),
        st.lists(st.integers(0, U32), max_size=5),
    ),
)
chunks = st.builds(
    Chunk,
    epoch=st.integers(0, U32),
    group=st.integers(0, U64),
    sequence=st.integers(0, U64),
    block=st.integers(0, U32),
    offset=st.integers(0, U64),
    data=st.binary(max_size=600),
    control=controls,
)


def encode(chunk: Chunk) -> bytes:
    return b"".join(wire.encode(chunk))


def message_of(chunk: Chunk, **changes: object) -> mesh_pb2.Chunk:
    """The same chunk as a message object, with its checksum taken from the frame."""
    message = mesh_pb2.Chunk(
        epoch=chunk.epoch, group=chunk.group, sequence=chunk.sequence, block=chunk.block, offset=chunk.offset, control=chunk.control
    )
    if len(chunk.data):
        message.data = bytes(chunk.data)
        message.padding = b""
        before = len(message.SerializeToString()) + 5 - len(chunk.data)  # plus the checksum, which is not set yet
        message.padding = bytes(-before % ALIGNMENT)
    message.crc32c = int.from_bytes(encode(chunk)[HEAD_BYTES - 4 : HEAD_BYTES], "little")
    return message


def assert_equal(got: Chunk, wanted: Chunk) -> None:
    fields = ("epoch", "group", "sequence", "block", "offset", "control")
    assert [getattr(got, name) for name in fields] == [getattr(wanted, name) for name in fields]
    assert bytes(got.data) == bytes(wanted.data)


def sample(data: Buffer = b"0123456789", control: mesh_pb2.Control | None = ANNOUNCEMENT) -> Chunk:
    return Chunk(epoch=7, group=0xABCDEF0123456789, sequence=841, block=3, offset=1 << 33, data=data, control=control)


@given(chunks)
def test_bytes_are_those_that_protobuf_writes(chunk: Chunk) -> None:
    assert encode(chunk) == message_of(chunk).SerializeToString()


@given(chunks)
def test_round_trip(chunk: Chunk) -> None:
    assert_equal(decode(encode(chunk)), chunk)


def test_checksum_is_crc32c_of_the_fields_and_of_all_behind_it() -> None:
    chunk = sample()
    fields = b"".join((value.to_bytes(size, "little")) for value, size in ((7, 4), (chunk.group, 8), (841, 8), (3, 4), (1 << 33, 8)))
    frame = encode(chunk)
    assert message_of(chunk).crc32c == crc32c(fields + frame[HEAD_BYTES:])
    assert crc32c(b"123456789") == 0xE3069283  # the polynomial's published check value (RFC 3720)


def test_every_order_of_fields_is_read() -> None:
    """Another library may write fields in any order; protobuf allows it."""
    chunk = sample(b"payload")
    message = message_of(chunk)
    parts = []
    for field, value in message.ListFields():
        part = mesh_pb2.Chunk()
        if field.name == "control":
            part.control.CopyFrom(value)
        else:
            setattr(part, field.name, value)
        parts.append(part.SerializeToString())
    orders = random.Random(5).sample(list(itertools.permutations(parts)), 200)
    for order in [parts, parts[::-1], [*parts[:6], *parts[:5:-1]], *orders]:
        assert_equal(decode(b"".join(order)), chunk)


def test_numbers_of_other_length_are_read() -> None:
    """A length may be written with extra bytes: the canonical reader does not match it, the tolerant one does."""
    chunk = sample(b"payload", control=None)
    frame = encode(chunk)
    assert frame[-9:] == b"\x7a\x07payload"
    assert_equal(decode(frame[:-8] + b"\x87\x80\x00payload"), chunk)


def test_a_chunk_without_padding_is_read() -> None:
    """Padding only makes sums faster; another library need not know it."""
    message = message_of(sample(b"payload"))
    message.ClearField("padding")
    plain = message.SerializeToString()
    with pytest.raises(ProtocolError, match="checksum"):
        decode(plain)  # the checksum is that of the padded frame
    fields = b"".join((value.to_bytes(size, "little")) for value, size in ((7, 4), (message.group, 8), (841, 8), (3, 4), (1 << 33, 8)))
    message.crc32c = crc32c(fields + plain[HEAD_BYTES:])
    assert_equal(decode(message.SerializeToString()), sample(b"payload"))


@pytest.mark.parametrize("size", [1, 7, 127, 128, 20_000, 3 << 20])
@pytest.mark.parametrize("control", [None, ANNOUNCEMENT], ids=["bare", "with control"])
def test_data_is_aligned_in_the_message(size: int, control: mesh_pb2.Control | None) -> None:
    frame = encode(sample(bytes(size), control))
    assert (len(frame) - size) % ALIGNMENT == 0
    assert np.frombuffer(decode(frame).data, np.uint8).ctypes.data % 16 == 0  # and so in memory, too


@pytest.mark.parametrize("data", [b"", b"\x00", b"0123456789"], ids=["no data", "one byte", "ten bytes"])
@pytest.mark.parametrize("control", [None, ANNOUNCEMENT], ids=["bare", "with control"])
def test_no_flipped_bit_goes_unnoticed(data: bytes, control: mesh_pb2.Control | None) -> None:
    """Flip each bit of the frame: it is refused, or read as exactly what was sent (if the bit carries no meaning)."""
    chunk = sample(data, control)
    frame = encode(chunk)
    refused = 0
    for position in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[position // 8] ^= 1 << position % 8
        try:
            got = decode(bytes(damaged))
        except ProtocolError:
            refused += 1
        else:
            assert_equal(got, chunk)
    assert refused >= (len(frame) - 6) * 8  # all but, at most, bits of the six tags


def test_flipped_bits_among_zeros_are_noticed() -> None:
    """All fields are zero: a field that goes missing still has its value, so only a flip that changes the content must be refused."""
    chunk = Chunk(0, 0, 0, data=bytes(5))
    frame = encode(chunk)
    for position in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[position // 8] ^= 1 << position % 8
        try:
            got = decode(bytes(damaged))
        except ProtocolError:
            continue
        assert_equal(got, chunk)


@given(chunks, st.data())
def test_truncated_frames_are_refused(chunk: Chunk, data: st.DataObject) -> None:
    frame = encode(chunk)
    cut = data.draw(st.integers(0, len(frame) - 1))
    try:
        got = decode(frame[:cut])
    except ProtocolError:
        return
    assert_equal(got, chunk)  # only a tail without meaning may be missing


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_garbage_raises_nothing_but_protocol_errors(frame: bytes) -> None:
    decode_or_refuse(frame)


@given(st.binary(max_size=60), st.integers(0, U32))
@settings(max_examples=300)
def test_garbage_behind_a_good_head_raises_nothing_but_protocol_errors(behind: bytes, epoch: int) -> None:
    """The checksum fits, as from a broken or hostile sender."""
    decode_or_refuse(forged(behind, epoch))


def decode_or_refuse(frame: bytes) -> None:
    try:
        chunk = decode(frame)
    except ProtocolError:
        return
    assert len(chunk.data) <= len(frame)


def forged(behind: bytes, epoch: int = 1) -> bytes:
    """A frame with a correct checksum and arbitrary bytes after the head."""
    head = encode(Chunk(epoch, 0, 0))[: HEAD_BYTES - 4]
    fields = epoch.to_bytes(4, "little") + bytes(28)
    return head + crc32c(fields + behind).to_bytes(4, "little") + behind


@pytest.mark.parametrize(
    ("behind", "text"),
    [
        (b"\x7a\xff\xff\xff\xff\x0f", "announces 4294967295 bytes of data"),
        (b"\x7a\xff\xff\xff\xff\x7f", "bytes of data but carries 0"),
        (b"\x7a\xff\xff\xff\xff\xff\x01", "a length in a chunk is malformed"),
        (b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a length in a chunk is malformed"),
        (b"\x7a\x05abc", "announces 5 bytes of data but carries 3"),
        (b"\x7a\x02abc", "announces 2 bytes of data but carries 3"),
        (b"\x3a\xff\xff\xff\xff\x07", "bytes of control but carries 0"),
        (b"\x3a\x05abc", "announces 5 bytes of control but carries 3"),
        (b"\x3a\x03\xff\xff\xff", "control part of a chunk is malformed"),
        (b"\x3a", "a length in a chunk is malformed"),
        (b"\x3a\x00\x4a", "unexpected field tag 0x4a"),
        (b"\x42", "a length in a chunk is malformed"),
        (b"\x42\x05abc", "announces 5 bytes of padding but carries 3"),
        (b"\x42\xff\xff\xff\xff\x07\x7a", "bytes of padding but carries 1"),
    ],
)
def test_impossible_lengths_are_refused(behind: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode(forged(behind))


def test_data_is_a_view_and_not_a_copy() -> None:
    payload = bytes(1 << 20)
    frame = encode(sample(payload, control=None))
    chunk = decode(frame)
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is frame
    assert chunk.frame is frame


def test_what_came_is_passed_on_as_it_came() -> None:
    frame = encode(sample())
    assert wire.encode(decode(frame)) == (frame,)


@given(chunks)
def test_under_tls_there_is_no_checksum_and_nobody_looks(chunk: Chunk) -> None:
    opened = b"".join(wire.encode(chunk, sealed=False))
    assert opened[HEAD_BYTES - 4 : HEAD_BYTES] == bytes(4)
    assert_equal(decode(opened, sealed=False), chunk)
    assert_equal(decode(encode(chunk), sealed=False), chunk)
    with pytest.raises(ProtocolError, match="checksum"):
        decode(opened)


def test_another_order_is_read_without_a_checksum_too() -> None:
    message = message_of(sample(b"payload"))
    message.ClearField("crc32c")
    assert_equal(decode(message.SerializeToString(), sealed=False), sample(b"payload"))


def test_what_came_without_a_checksum_gets_one_where_it_needs_one() -> None:
    """For a ring in which some links use checksums and others do not."""
    came = decode(b"".join(wire.encode(sample(), sealed=False)), sealed=False)
    assert came.frame is not None
    assert wire.encode(came, sealed=False) == (came.frame,)
    assert b"".join(wire.encode(came)) == encode(sample())
    sealed = decode(encode(sample()))
    assert wire.encode(sealed, sealed=False) == (sealed.frame,)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_sent(kind: type[Buffer]) -> None:
    assert encode(sample(kind(b"abcd"))) == encode(sample(b"abcd"))


def test_a_wide_array_is_sent_as_its_bytes() -> None:
    words = memoryview(bytes(range(32))).cast("I")
    assert bytes(decode(encode(sample(words))).data) == bytes(range(32))
