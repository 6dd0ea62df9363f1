"""`Connection`: a stream of bytes to a peer over a TCP socket, plain or under TLS (tls.py).

[Note: unsent bytes] The bytes that the system has taken go out in order: a ping, or the news that a collective has failed, waits
for all of them. Without a limit the system takes megabytes: up to 4 MiB on a link of 100 Mbit/s, which is a third of a second. So
we give it only as much as keeps the link busy until the loop comes round again, and 0.9 to 1.6 MiB are under way. This does not slow
down a link that is faster than this machine: there no bytes wait.

[Note: low water] A large message arrives in segments of 64 KiB at most, and a process that wakes for each segment spends more time on
waking than on reading. So the process tells the system how many bytes are certain to come (SO_RCVLOWAT), and sleeps until they are
there. This made an `all_gather` between nodes a tenth faster (benchmarks/README.md). The system lowers the number where it could not
hold so many bytes, and wakes the process at the end of a connection in any case. A growing count of unread bytes shows that the peer
is alive (pulse.py).
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

UNSENT_BYTES = 512 * KIB  # that the system takes beyond the bytes that are on their way, see [Note: unsent bytes]
_INT = struct.Struct("i")


def tune(sock: socket.socket) -> None:
    """Set the options of a TCP connection to another process."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class Connection(ABC):
    """One end of a connection; lives as long as its socket, which it owns. Runs on one loop.

    `recv_into` and `sendmsg` never wait: BlockingIOError says that the socket must be readable, or writable, first. Use
    either these two or `receive` and `send_all`, which wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is connected and does not block."""
        self.socket = sock
        self._low_water = 1  # SO_RCVLOWAT, socket(7)

    @property
    def identity(self) -> Identity | None:
        """The identity that the other end has proved; None in plaintext."""
        return None

    @property
    def is_tamper_proof(self) -> bool:
        """Whether nobody can have changed the bytes that arrive: chunks need no checksum then."""
        return False

    @property
    def has_input(self) -> bool:
        """Whether input, or the end of it, has been taken from the socket but not received yet, so that the socket does not show it."""
        return False

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """How many bytes were sent so far, counted as they go over the wire."""

    @property
    def unacknowledged_bytes(self) -> int:
        """How many written bytes the peer's system does not have yet, whether on their way or not (TIOCOUTQ, tcp(7))."""
        (count,) = _INT.unpack(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(_INT.size)))
        return int(count)

    @property
    def unread_bytes(self) -> int:
        """How many bytes the system has received that nobody has read yet (FIONREAD, tcp(7))."""
        (count,) = _INT.unpack(fcntl.ioctl(self.socket, termios.FIONREAD, bytes(_INT.size)))
        return int(count)

    def wake_at(self, count: int) -> None:
        """Promise that `count` more bytes for `recv_into` are certain to come: whoever waits for the socket to be readable is woken only
        when all of them, or the end, are there. See [Note: low water]."""
        if count != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count

    @abstractmethod
    def recv_into(self, room: memoryview) -> int:
        """Receive as many bytes as are there and fit into `room`; returns how many, 0 at the end."""

    @abstractmethod
    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send; returns how many bytes were taken. The caller may use their buffers again."""

    @abstractmethod
    def flush(self) -> None:
        """Give the system all bytes that `sendmsg` took. Raises BlockingIOError if the system does not take all of them."""

    @abstractmethod
    async def receive(self, count: int) -> bytes:
        """Receive at most `count` bytes; empty at the end."""

    @abstractmethod
    async def send_all(self, data: bytes) -> None:
        """Send; returns when the system has all of it."""

    def finish(self) -> None:
        """Tell the peer that nothing more will be sent. Raises OSError."""
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
        """Do nothing: the system has all of it already."""

    async def receive(self, count: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, count)

    async def send_all(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)
