"""Which part of a collective's time a function counts as."""

import asyncio
import socket
import ssl
from types import CodeType

import numpy as np
import pytest
from crc32c import crc32c

from benchmarks.explain import _part_of
from benchmarks.parts import CHECKSUMS, COLLECTIVES, COPYING, PEERS, RECEIVING, REDUCING, SENDING, TLS, TRANSPORT
from shardnet import wire
from shardnet.collectives.exchange import Exchange
from shardnet.collectives.letters.round import Round
from shardnet.collectives.reduction import Reduction, copy_bytes
from shardnet.pb import mesh_pb2
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.shared_memory import Mailbox, futex
from shardnet.transport.shared_memory.window import Window


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (copy_bytes.__code__, COPYING),
        (Window.put.__code__, COPYING),
        (np.copy.__wrapped__.__code__, COPYING),  # type: ignore[attr-defined]  # numpy dispatches by a wrapper that has no annotation
        (Reduction.sum.__code__, REDUCING),
        (wire.decode.__code__, TRANSPORT),
        (GrpcMesh.send.__code__, TRANSPORT),
        (Exchange.run.__code__, COLLECTIVES),
        (asyncio.sleep.__code__, COLLECTIVES),
        (Round._wait.__code__, PEERS),
        (Round.advance.__code__, COLLECTIVES),
        (ssl.SSLObject.read.__code__, TLS),
        (futex.wait.__code__, PEERS),
        (futex.wait_any.__code__, PEERS),
        (futex.wake.__code__, SENDING),
        (Mailbox.post.__code__, TRANSPORT),
    ],
    ids=lambda value: getattr(value, "co_qualname", value),
)
def test_functions_count_by_what_they_do(code: CodeType, part: str) -> None:
    assert _part_of(code) == part


def test_built_in_functions_count_by_their_name() -> None:
    """By the text that cProfile records for them."""
    with socket.socket() as sock:
        assert _part_of(repr(type(sock).sendmsg)) == SENDING
        assert _part_of(repr(type(sock).send)) == SENDING
        assert _part_of(repr(type(sock).recv_into)) == RECEIVING
    assert _part_of(repr(ssl.MemoryBIO.write)) == TLS
    assert _part_of(repr(crc32c)) == CHECKSUMS
    assert _part_of(repr(mesh_pb2.Control.SerializeToString)) == TRANSPORT
    assert _part_of(repr(len)) == COLLECTIVES
