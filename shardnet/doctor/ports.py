"""The ports of the other doctors: each doctor tries all of them itself, because a mesh that lacks one pair fails as a whole."""

import asyncio
import os
import socket
import time
from dataclasses import dataclass

from shardnet.address import Address
from shardnet.credentials import Security
from shardnet.doctor.finding import Finding, ok, problem
from shardnet.errors import HandshakeError, UsageError
from shardnet.topology import Member, Topology
from shardnet.transport.dialing import knock

DIAL_S = 8.0  # three lost packets may delay a connection: TCP sends the first one again after 1, 3 and 7 s
_CLOSED = (
    "let this machine connect to the ports of workers there: is a firewall, a security group, a wrong route or too small an MTU in the "
    "way? Each machine must reach each other one. If this is not the address by which others reach that machine, start the doctor and the "
    "workers there with --listen HOST, or with SHARDNET_ADVERTISE=HOST:PORT"
)
_LOOPBACK = "a loopback address can be reached only on its own machine: start the doctor and the workers there with --listen HOST"
_UNTRUSTED = "all machines need certificates of one authority, or the same token; see docs/security.md"


@dataclass(frozen=True, slots=True)
class Port:
    """What one doctor has found at the port of another one: how long it took to connect or, if that failed, why and what to do."""

    took_s: float
    problem: str = ""
    advice: str = ""


async def try_ports(topology: Topology, security: Security) -> dict[int, Port]:
    """Try the ports of all others, by rank, at once; takes up to DIAL_S."""
    others = [member for member in topology.members if member.rank != topology.rank]
    ports = await asyncio.gather(*(_try(member, topology, security) for member in others))
    return {member.rank: port for member, port in zip(others, ports, strict=True)}


async def _try(member: Member, topology: Topology, security: Security) -> Port:
    start = time.perf_counter()
    why, advice = "", ""
    try:
        security.check(member.address)
        async with asyncio.timeout(DIAL_S):
            await knock(Address.parse(member.address), security, member.identity)
    except UsageError as error:
        why = str(error)
    except HandshakeError as error:
        why, advice = str(error), _UNTRUSTED
    except OSError as error:
        far = member.node_group != topology.me.node_group
        why, advice = _why(error), _LOOPBACK if far and Address.parse(member.address).is_loopback else _CLOSED
    return Port(time.perf_counter() - start, why, advice)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return f"nothing answers within {DIAL_S:g} s"
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def about_port(member: Member, topology: Topology, port: Port) -> Finding:
    if port.problem:
        return problem("peers", f"{place(member, topology)} cannot be reached from this machine: {port.problem}", port.advice)
    return ok("peers", f"{place(member, topology)} can be reached, answers in {1e3 * port.took_s:.1f} ms")


def name(member: Member) -> str:
    return f"rank {member.rank} ({member.address})"


def place(member: Member, topology: Topology) -> str:
    """Its name, and the machine on which it is."""
    near = member.node_group == topology.me.node_group
    return f"rank {member.rank} ({member.address}, {'this machine' if near else member.node})"
