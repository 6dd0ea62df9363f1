"""`Connection`: a stream of bytes to a peer over a TCP socket, plain or under TLS (tls.py).

[Note: unsent bytes] What the system has taken goes out in order: a ping, or the news that a collective has failed, waits
behind all of it. Left to itself it takes megabytes: up to 4 MiB on a link of 100 Mbit/s, which is a third of a second. So it
gets no more than keeps the link busy until the loop comes round again, and 0.9 to 1.6 MiB are under way. A link that is
faster than this machine is no slower for it: there nothing waits.

[Note: low water] What a large message is made of arrives in segments of 64 KiB at most, and a process that is woken for each of them takes
longer to look than to read. So it says how much is certain to come, and sleeps until that is there, which took a tenth of the time
off an `all_gather` between nodes (benchmarks/README.md). The system makes it less where it could not hold as much, and wakes at the end of
a connection in any case. How much lies there unread shows that the peer lives (pulse.py).
"""

import asyncio
import fcntl
import socket
import struct
import termios
from abc import ABC, abstractmethod
from collections.abc import Sequence

from shardnet.config import KIB
from shardnet.credentials import Identity
from shardnet.wire import Buffer

UNSENT_BYTES = 512 * KIB  # that the system takes beyond what is on its way, see [Note: unsent bytes]
_INT = struct.Struct("i")


def tune(sock: socket.socket) -> None:
    """Set the options of a TCP connection to another process."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class Connection(ABC):
    """One end of a connection; lives as long as its socket, which it owns. Runs on one loop.

    `recv_into` and `sendmsg` never wait: BlockingIOError says that the socket must be readable, or writable, first. Use
    either them or `receive` and `send_all`, which wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is connected and does not block."""
        self.socket = sock
        self._low_water = 1  # SO_RCVLOWAT, socket(7)

    @property
    def identity(self) -> Identity | None:
        """Who the other end has proved to be; None in plaintext."""
        return None

    @property
    def is_tamper_proof(self) -> bool:
        """Whether what arrives can only be what was sent: chunks need no checksum then."""
        return False

    @property
    def has_input(self) -> bool:
        """Whether there is something to receive, be it the end, of which the socket knows nothing any more."""
        return False

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Of what was sent so far, as it goes over the wire."""

    @property
    def unacknowledged_bytes(self) -> int:
        """Those of them that the peer's system does not have, be they on their way or not (TIOCOUTQ, tcp(7))."""
        (count,) = _INT.unpack(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(_INT.size)))
        return int(count)

    @property
    def unread_bytes(self) -> int:
        """That the system has received and nobody has read yet (FIONREAD, tcp(7))."""
        (count,) = _INT.unpack(fcntl.ioctl(self.socket, termios.FIONREAD, bytes(_INT.size)))
        return int(count)

    def wake_at(self, count: int) -> None:
        """So many bytes of what `recv_into` gives are certain to come: who waits for the socket to be readable is woken when they, or the
        end, are there. See [Note: low water]."""
        if count != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    @abstractmethod
    def recv_into(self, room: memoryview) -> int:
        """Receive; returns how many bytes, 0 at the end. As many as there are and `room` takes."""

    @abstractmethod
    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send; returns how many bytes were taken, whose buffers may be used again."""

    @abstractmethod
    def flush(self) -> None:
        """Give the system what was taken. Raises BlockingIOError if it does not take all of it."""

    @abstractmethod
    async def receive(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end."""

    @abstractmethod
    async def send_all(self, data: bytes) -> None:
        """Send; returns when the system has it."""

    def finish(self) -> None:
        """Nothing more will be sent. Raises OSError."""
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()


class PlainConnection(Connection):
    """The socket as it is."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._written_bytes = 0

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    def recv_into(self, room: memoryview) -> int:
        return self.socket.recv_into(room)

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        count = self.socket.sendmsg(buffers)
        self._written_bytes += count
        return count

    def flush(self) -> None:
        """It has all of it."""

    async def receive(self, count: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, count)

    async def send_all(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)
