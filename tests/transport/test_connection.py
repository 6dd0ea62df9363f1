"""How many of a connection's bytes the kernel takes."""

import select
import socket

import pytest

from shardnet.address import Address
from shardnet.config import KIB, MIB
from shardnet.credentials import Security
from shardnet.transport.connection import UNSENT_BYTES
from shardnet.transport.dialing import dial

QUIET_S = 0.3  # after this time nothing more is on its way over loopback
SEGMENT_BYTES = 64 * KIB  # the last one may be whole


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such bound")
async def test_little_waits_in_the_system_for_a_peer_that_does_not_read() -> None:
    """Whatever is sent later, such as a ping, waits after it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = await dial(Address(*server.getsockname()), Security())
        peer, _ = server.accept()
        with peer:
            sent = 0
            while select.select([], [connection.socket], [], QUIET_S)[1]:
                sent += connection.sendmsg([bytes(4 * MIB)])
            assert sent > UNSENT_BYTES
            assert 0 < connection.unacknowledged_bytes <= UNSENT_BYTES + SEGMENT_BYTES
            connection.close()
