"""The rendezvous: whether it can be reached, and answers."""

import asyncio
import os
import socket
import time

from shardnet.address import Address
from shardnet.credentials import Security
from shardnet.doctor.finding import Finding, ok, problem, warning
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError, UsageError
from shardnet.transport.observe import Health, health, snapshot
from shardnet.version import VERSION

RENDEZVOUS = "rendezvous"  # its role in its own statistics


async def about_rendezvous(address: str, security: Security, timeout_s: float) -> list[Finding]:
    """Check its name, its port, whether both ends trust each other, and what it says about itself; stop at the first check that fails."""
    target = Address.parse(address)
    try:
        security.check(address)
        found = await _resolve(target)
        took_s = await _reach(target, timeout_s)
    except UsageError as error:
        return [problem("rendezvous", str(error))]
    except socket.gaierror as error:
        return [problem("rendezvous", f"{target.host!r} cannot be resolved: {error.strerror}", "check the name, or give the IP address")]
    except (OSError, TimeoutError) as error:
        return [problem("rendezvous", f"{address} cannot be reached: {_why(error, timeout_s)}", _advice(error))]
    return [
        ok("rendezvous", f"{target.host} is {', '.join(found)}; connected in {1e3 * took_s:.1f} ms"),
        *await _ask(address, security, timeout_s),
    ]


async def _resolve(target: Address) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return sorted({str(where[0]) for *_, where in found})


async def _reach(target: Address, timeout_s: float) -> float:
    """Connect; returns after how many seconds the connection was there."""
    start = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(target.host, target.port)
    took_s = time.perf_counter() - start
    writer.close()
    await writer.wait_closed()
    return took_s


async def _ask(address: str, security: Security, timeout_s: float) -> list[Finding]:
    try:
        stats = await snapshot(address, timeout_s=timeout_s, security=security)
        state = await health(address, timeout_s=timeout_s, security=security)
    except HandshakeError as error:
        return [problem("rendezvous", str(error), "both sides need certificates of one authority, or the same token; see docs/security.md")]
    except (EndpointUnavailable, ProtocolError) as error:
        return [problem("rendezvous", str(error), "check that a shardnet rendezvous listens there")]
    if stats.role != RENDEZVOUS:
        return [problem("rendezvous", f"{address} is a {stats.role}", "give the address of the rendezvous")]
    if state is not Health.SERVING:
        return [problem("rendezvous", f"{address} is {state}", "wait until it is serving, or look at the log of the rendezvous")]
    if stats.version != VERSION:
        return [warning("rendezvous", f"it has shardnet {stats.version}, and this machine {VERSION}", "install one version everywhere")]
    return [ok("rendezvous", f"{address} is {state}, shardnet {stats.version}, {stats.connections or security}")]


def _why(error: OSError, timeout_s: float) -> str:
    return (
        f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else str(error)
    )


def _advice(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no process listens there: start `shardnet rendezvous --listen HOST:PORT` there, with a HOST that other machines can reach"
    return "is a firewall, security group or network policy in between? The rendezvous' TCP port must be open, and one for each worker"
