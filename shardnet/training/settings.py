"""What `connect()` needs to know, read from the environment that a launcher sets."""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.errors import RendezvousUnavailable, UsageError

RESOLVE_EVERY_S = 0.5  # a rendezvous that starts later may have no name yet (container networks)


@dataclass(frozen=True, slots=True)
class Settings:
    """How one worker finds its cluster. Every field may be given to `connect()`; the rest comes from SHARDNET_* variables.

    rendezvous      host:port; empty: no cluster, a world of one
    listen          host or host:port of this worker; empty: loopback if the rendezvous is there, else the address of
                    this machine from which the rendezvous is reached
    node            identity of this machine; empty: found (host name and boot id)
    report_file     where the launcher wants to read this worker's address and rank; empty: nowhere
    trace           where rank 0 writes a timeline of all ranks at the end; empty: none is kept. Alike on all ranks
    """

    rendezvous: str = ""
    job: str = "default"
    min_world_size: int = 1
    max_world_size: int = 1
    local_rank: int = 0
    node: str = ""
    listen: str = ""
    insecure: bool = False
    report_file: str = ""
    trace: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **given: object) -> Self:
        """Settings from SHARDNET_* variables; what is `given` wins. Raises UsageError for a value that makes no sense."""
        environment = os.environ if environment is None else environment
        world_size = _number(environment, "SHARDNET_WORLD_SIZE", 1)
        found: dict[str, object] = {
            "rendezvous": environment.get("SHARDNET_RENDEZVOUS", ""),
            "job": environment.get("SHARDNET_JOB", "default"),
            "min_world_size": _number(environment, "SHARDNET_MIN_WORLD_SIZE", world_size),
            "max_world_size": _number(environment, "SHARDNET_MAX_WORLD_SIZE", world_size),
            "local_rank": _number(environment, "SHARDNET_LOCAL_RANK", 0),
            "node": environment.get("SHARDNET_NODE", ""),
            "listen": environment.get("SHARDNET_LISTEN", ""),
            "insecure": environment.get("SHARDNET_INSECURE", "") == "1",
            "report_file": environment.get("SHARDNET_REPORT_FILE", ""),
            "trace": environment.get("SHARDNET_TRACE", ""),
        }
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise UsageError(f"connect() has no setting {', '.join(sorted(unknown))}; there are: {', '.join(cls.__dataclass_fields__)}")
        return cls(**{**found, **given})  # type: ignore[arg-type]  # the fields' own types; checked where they are used

    async def listen_address(self) -> str:
        """host:port to bind; port 0 where the system shall choose. Waits until the rendezvous' name is known, up to `connect_s`."""
        if not self.listen:
            return str(Address(await self._local_address(), 0))
        return self.listen if _has_port(self.listen) else str(Address(self.listen, 0))

    async def public_address(self, bound: str) -> str:
        """Where peers reach what was bound: the same, unless that was 'all addresses'."""
        address = Address.parse(bound)
        return str(Address(await self._local_address(), address.port)) if address.is_unspecified else bound

    async def _local_address(self) -> str:
        """The address of this machine from which it reaches the rendezvous."""
        target = Address.parse(self.rendezvous)
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                while (found := await _route_to(target)) is None:  # noqa: ASYNC110 - DNS tells nobody when it changes
                    await asyncio.sleep(RESOLVE_EVERY_S)
        except TimeoutError:
            raise RendezvousUnavailable(
                f"the name {target.host!r} of the rendezvous was not known within {self.timeouts.connect_s:g} s; "
                "check it, or give its IP address"
            ) from None
        return found


async def _route_to(target: Address) -> str | None:
    """The local end of the route to `target`, None while its name is unknown. Connecting UDP sends no packet."""
    loop = asyncio.get_running_loop()
    try:
        family, kind, protocol, _, where = (await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM))[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _has_port(listen: str) -> bool:
    return (listen.startswith("[") and "]:" in listen) or listen.count(":") == 1


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, got {text!r}") from None
