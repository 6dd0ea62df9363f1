"""Listening sockets, and if one cannot be opened, why and what to do about it."""

import asyncio
import errno
import socket

from shardnet.address import Address
from shardnet.errors import ListenError

_BACKLOG = 1024
_TRIES = 5  # to find one port that is free on all addresses of a name

Found = tuple[int, tuple[str | int | bytes, ...]]  # address family, and the address as sockets take it


async def listening_sockets(address: Address) -> list[socket.socket]:
    """Sockets that listen on every address of `address`, all on one port. Raises ListenError."""
    await check_free(address)
    found = await _resolve(address)
    for attempt in range(_TRIES):
        try:
            return _bind_all(found)
        except OSError as error:
            if address.port or attempt == _TRIES - 1:
                raise ListenError(f"cannot listen on {address}: {_advice(error)}") from error
    raise AssertionError


def _bind_all(found: list[Found]) -> list[socket.socket]:
    """Bind all addresses. One that cannot be bound at all, such as IPv6 on a machine without it, is left out if another can be."""
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, where in found:
        port = sockets[0].getsockname()[1] if sockets else where[1]
        try:
            sockets.append(_bind(family, (where[0], port, *where[2:])))
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
    if problem is not None and (not sockets or problem.errno == errno.EADDRINUSE):
        for sock in sockets:
            sock.close()
        raise problem
    return sockets


def _bind(family: int, where: tuple[str | int | bytes, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last connections are in TIME_WAIT is free
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::")
        sock.bind(where)
        sock.listen(_BACKLOG)  # here: of two processes that bind at the same moment, the second one learns of it now
    except BaseException:
        sock.close()
        raise
    return sock


async def check_free(address: Address) -> None:
    """Raise ListenError, with the reason and what to do, unless `address` can be bound. gRPC would only log the reason."""
    found = await _resolve(address)
    problems = [problem for family, where in found if (problem := _bind_problem(family, where)) is not None]
    in_use = [problem for problem in problems if problem.errno == errno.EADDRINUSE]
    # A name may have an IPv6 address on a machine without IPv6: one address that can be bound is enough, unless another is in use.
    if in_use or len(problems) == len(found):
        problem = (in_use or problems)[0]
        raise ListenError(f"cannot listen on {address}: {_advice(problem)}") from problem


async def _resolve(address: Address) -> list[Found]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: the host name cannot be resolved ({error.strerror}); use one of this machine"
        ) from error
    return [(family, where) for family, _, _, _, where in found]


def _bind_problem(family: int, where: tuple[str | int | bytes, ...]) -> OSError | None:
    """Why one resolved address cannot be bound."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # With this option binding fails if another socket listens there, but not if another probe is bound, so probes never clash.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                "another process already listens there; end it, give each process a port of its own, or use port 0 to let the system choose"
            )
        case errno.EADDRNOTAVAIL:
            return "this machine does not have the address; use one that it has, or 0.0.0.0 for all of them"
        case errno.EACCES:
            return "this user may not open the port; choose one above 1023"
        case _:
            return f"{error.strerror}; choose another address"
