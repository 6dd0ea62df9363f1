"""HTTP, byte by byte: what a port answers to requests that a library would not send."""

import asyncio
import socket
from dataclasses import dataclass

from shardnet.address import Address


@dataclass
class Answer:
    status: int
    fields: dict[str, str]
    body: str


async def say(address: str, *parts: bytes) -> bytes:
    """Send this to the port, and return its whole answer."""
    loop = asyncio.get_running_loop()
    with await knock(address) as sock:
        for part in parts:
            await loop.sock_sendall(sock, part)
        answer = b""
        while more := await loop.sock_recv(sock, 65536):
            answer += more
        return answer


async def knock(address: str) -> socket.socket:
    """Open a connection, which the caller closes; uvloop's streams would leave a descriptor to its loop."""
    sock = socket.socket()
    sock.setblocking(False)
    target = Address.parse(address)
    await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
    return sock


async def get(address: str, path: str, *, method: str = "GET", accept: str = "*/*", host: str = "") -> Answer:
    said = await say(address, f"{method} {path} HTTP/1.1\r\nHost: {host or address}\r\n".encode(), f"Accept: {accept}\r\n\r\n".encode())
    head, _, body = said.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert int(fields["content-length"]) == len(body.encode())
    return Answer(int(first.split()[1]), fields, body)
