"""The settings of `connect()`, read from the environment that a launcher or a scheduler sets."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Self

from shardnet.address import MAX_PORT, Address
from shardnet.collectives.route import Routing
from shardnet.config import Limits, NodeEngine, Timeouts
from shardnet.credentials import Role, Security, find_token
from shardnet.errors import AddressError, CredentialsError, RendezvousUnavailable, UsageError
from shardnet.rendezvous.request import MAX_WORLD_SIZE, check_text
from shardnet.settings.hints import Hints
from shardnet.variables import flag, misspelt

log = logging.getLogger(__name__)
RESOLVE_EVERY_S = 0.5  # a rendezvous that starts later may have no name yet (container networks)
PATIENCE_S = 5.0  # until the log says what this waits for
ANSWER_S = 2.0  # for one of several addresses


@dataclass(frozen=True, slots=True)
class Settings:
    """How one worker finds its cluster. Every field may be given to `connect()`; the rest comes from SHARDNET_* variables, and values
    that these leave open come from the variables of the scheduler that has started this process (`from_environment`).

    The variable of a field is SHARDNET_ and its name in capitals. SHARDNET_WORLD_SIZE sets both world sizes, SHARDNET_TOKEN_FILE names a
    file with the token, SHARDNET_TIMEOUTS holds the timeouts to change ("collective_s=300,join_s=60"); `limits` has no variable.

    rendezvous      host:port; empty: no cluster, a world of one
    job             the job at the rendezvous that this worker joins. The same on all ranks
    min_world_size  with this many workers the job begins if no more come for a while; 1 without a rendezvous. The same on all ranks
    max_world_size  with this many workers the job begins at once, and takes in no more. The same on all ranks
    listen          host or host:port of this worker; empty: loopback if the rendezvous is there, otherwise the address of
                    this machine from which the rendezvous is reached
    advertise       host:port at which the others reach this worker, if that is not where it listens: a container's published port,
                    address translation, a relay; empty: where it listens
    elastic         the job goes on when workers are lost, down to `min_world_size` of them, and takes in new ones: see `Cluster.reform`
                    and shardnet.elastic. The same on all ranks
    replacement     this worker was started in place of a lost one: if the training has ended meanwhile, it does not begin it again
    local_rank      number among the workers of this machine
    wished_rank     the rank that this worker would like in a first epoch; -1: any. It is only a wish: ranks of a node are consecutive
    node            identity of this machine; empty: made from host name and boot id
    shared_memory   whether data for the other ranks of this node may go through shared memory, and gathered parameters be shared with them
    routing         which way large collectives go: "auto" (direct inside a node, a ring across nodes), "ring" (one ring of all
                    ranks), "direct" (every rank to every rank) or "rank-order" (like "direct", and every sum is bit for bit that of a
                    loop over the ranks). The same on all ranks
    node_engine     what carries large data between the ranks of a node: "shardnet" (this package), "nccl" (tensors on GPUs; each rank takes
                    the GPU of its number on the machine, unless the program has begun to use one) or "gloo" (torch's engine for CPUs).
                    The same on all ranks
    report_file     file in which the launcher wants to read this worker's address and rank; empty: none
    insecure        allow unencrypted connections to and from other machines
    certs           folder with this machine's certificate, as `shardnet certs issue` makes it: all connections are encrypted, and only
                    holders of certificates of the same authority take part
    token           instead of `certs`: a secret that all processes share, as `shardnet certs token` makes it
    trace           file to which rank 0 writes a timeline of all ranks at the end; empty: none. The same on all ranks
    track           folder into which rank 0 writes what the program reports: metrics.jsonl, and TensorBoard's events if that is
                    installed; empty: nowhere
    flight          folder to which this worker writes its last collectives when one fails, once per epoch (docs/diagnosis.md);
                    empty: nowhere
    reflection      tools may ask this worker's port which services it has (package grpcio-reflection)
    metrics         host:port that serves this worker's statistics by HTTP as Prometheus' text, at /metrics (package
                    prometheus_client); the real port is this port plus `local_rank`; port 0: one that the system chooses; empty:
                    nowhere. Unencrypted, so on loopback only unless `insecure` (docs/observing.md)
    timeouts        see shardnet.config
    limits          see shardnet.config. The same on all ranks
    """

    rendezvous: str = ""
    job: str = "default"
    min_world_size: int = 1
    max_world_size: int = 1
    local_rank: int = 0
    wished_rank: int = -1
    node: str = ""
    listen: str = ""
    advertise: str = ""
    elastic: bool = False
    replacement: bool = False
    insecure: bool = False
    certs: str = ""
    token: str = field(default="", repr=False)
    shared_memory: bool = True
    routing: Routing = Routing.AUTO
    node_engine: NodeEngine = NodeEngine.SHARDNET
    report_file: str = ""
    trace: str = ""
    track: str = ""
    flight: str = ""
    reflection: bool = False
    metrics: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def check_names(cls, given: Iterable[str]) -> None:
        """Raise UsageError if a name is not a setting."""
        if unknown := set(given).difference(cls.__dataclass_fields__):
            raise UsageError(f"connect() has no setting {', '.join(sorted(unknown))}; there are: {', '.join(cls.__dataclass_fields__)}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **given: object) -> Self:
        """Settings from SHARDNET_* variables; `given` values win. An empty variable counts as not set.

        If neither gives the world size, the number of this worker or the job, a scheduler does ([Note: who has the say]).

        Raises UsageError or AddressError for a value that makes no sense, naming where it came from, and CredentialsError for a token that
        cannot be read.
        """
        cls.check_names(given)
        environment = os.environ if environment is None else environment
        known = given.get("max_world_size") or _number(
            environment, "SHARDNET_MAX_WORLD_SIZE", _number(environment, "SHARDNET_WORLD_SIZE", 0)
        )
        hints = Hints.find(environment, given, known if isinstance(known, int) else 0)
        world_size = _number(environment, "SHARDNET_WORLD_SIZE", hints.world_size)
        found: dict[str, object] = {
            "rendezvous": environment.get("SHARDNET_RENDEZVOUS", ""),
            "job": environment.get("SHARDNET_JOB", "") or hints.job,
            "min_world_size": _number(environment, "SHARDNET_MIN_WORLD_SIZE", world_size),
            "max_world_size": _number(environment, "SHARDNET_MAX_WORLD_SIZE", world_size),
            "local_rank": _number(environment, "SHARDNET_LOCAL_RANK", hints.local_rank),
            "wished_rank": _number(environment, "SHARDNET_WISHED_RANK", hints.wished_rank),
            "elastic": flag(environment, "SHARDNET_ELASTIC"),
            "replacement": flag(environment, "SHARDNET_REPLACEMENT"),
            "node": environment.get("SHARDNET_NODE", ""),
            "listen": environment.get("SHARDNET_LISTEN", ""),
            "advertise": environment.get("SHARDNET_ADVERTISE", ""),
            "insecure": flag(environment, "SHARDNET_INSECURE"),
            "certs": environment.get("SHARDNET_CERTS", ""),
            "token": "" if "token" in given else find_token(environment),
            "shared_memory": flag(environment, "SHARDNET_SHARED_MEMORY", default=True),
            "routing": environment.get("SHARDNET_ROUTING", "") or Routing.AUTO,
            "node_engine": environment.get("SHARDNET_NODE_ENGINE", "") or NodeEngine.SHARDNET,
            "report_file": environment.get("SHARDNET_REPORT_FILE", ""),
            "trace": environment.get("SHARDNET_TRACE", ""),
            "track": environment.get("SHARDNET_TRACK", ""),
            "flight": environment.get("SHARDNET_FLIGHT", ""),
            "reflection": flag(environment, "SHARDNET_REFLECTION"),
            "metrics": environment.get("SHARDNET_METRICS", ""),
            "timeouts": given.get("timeouts") or _timeouts(environment),
        }
        merged = {**found, **given}
        for name, kind in (("routing", Routing), ("node_engine", NodeEngine)):
            with suppress(ValueError):  # other values are refused below
                merged[name] = kind(str(merged[name]))
        settings = cls(**merged)  # type: ignore[arg-type]  # checked in the next line
        settings._check(given.keys(), environment, hints)
        return settings

    @classmethod
    def misspelt(cls, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Variables that nobody reads but that look like one of those above, each with the one that it looks like."""
        own = {f"SHARDNET_{each.name.upper()}" for each in fields(cls)} - {"SHARDNET_LIMITS"}
        return misspelt(environment, own | {"SHARDNET_WORLD_SIZE", "SHARDNET_LOCAL_WORLD_SIZE", "SHARDNET_TOKEN_FILE"})

    def _check(self, given: Collection[str], environment: Mapping[str, str], hints: Hints) -> None:
        """Raise for settings that cannot work, before anything is opened."""

        def source(name: str) -> str:
            if name in given:
                return f"{name} of connect()"
            variable = f"SHARDNET_{name.upper()}"
            if environment.get(variable) or not name.endswith("_world_size"):
                return variable
            return "SHARDNET_WORLD_SIZE" if environment.get("SHARDNET_WORLD_SIZE") else hints.world_size_from

        for name, kind in (("routing", Routing), ("node_engine", NodeEngine)):
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{source(name)} must be one of {', '.join(kind)}, got {getattr(self, name)!r}")
        if self.node_engine is not NodeEngine.SHARDNET and self.routing is not Routing.AUTO:
            raise UsageError(
                f"{source('node_engine')} {self.node_engine.value!r} needs routing 'auto', which tells nodes apart, "
                f"but {source('routing')} is {self.routing.value!r}"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, each.type) or isinstance(value, bool) is not (each.type is bool):  # type: ignore[arg-type]
                raise UsageError(f"{source(each.name)} must be of type {each.type.__name__}, got {value if each.repr else '...'!r}")  # type: ignore[union-attr]
        check_text(source("job"), self.job)
        if self.node:
            check_text(source("node"), self.node)
        if self.rendezvous and not _parse(source("rendezvous"), self.rendezvous).port:
            raise AddressError(f"{source('rendezvous')}: {self.rendezvous!r} has port 0; give the port at which the rendezvous listens")
        if self.listen:
            _parse(source("listen"), self.given_listen_address)
        if self.advertise and not _parse(source("advertise"), self.advertise).port:
            raise AddressError(f"{source('advertise')}: {self.advertise!r} has port 0; give the port at which peers reach this worker")
        if self.local_rank < 0:
            raise UsageError(f"{source('local_rank')} must not be negative, got {self.local_rank}")
        if not -1 <= self.wished_rank < MAX_WORLD_SIZE:
            raise UsageError(f"{source('wished_rank')} must be a rank, or -1 for any, got {self.wished_rank}")
        if self.metrics and _parse(source("metrics"), self.metrics).port + self.local_rank > MAX_PORT:
            raise AddressError(f"{source('metrics')}: {self.metrics!r} plus local rank {self.local_rank} gives a port above {MAX_PORT}")
        least, most = source("min_world_size"), source("max_world_size")
        if not 1 <= self.min_world_size <= self.max_world_size <= MAX_WORLD_SIZE:
            raise UsageError(
                f"the minimum world size is {self.min_world_size} ({least}) and the maximum {self.max_world_size} ({most}); "
                f"choose 1 <= minimum <= maximum <= {MAX_WORLD_SIZE}"
            )
        if self.min_world_size > 1 and not self.rendezvous:  # each worker would silently train alone
            raise UsageError(
                f"{least} asks for {self.min_world_size} workers, but without {source('rendezvous')} they cannot meet; "
                "start the program with `shardnet run`, or give the host:port of a rendezvous"
            )

    def security(self) -> Security:
        """How this worker's connections are protected. Raises CredentialsError for certificates that do not allow its job."""
        security = Security.find(Role.WORKER, insecure=self.insecure, certs=self.certs, token=self.token)
        identity = None if security.credentials is None else security.credentials.identity
        if identity is not None and not identity.may_join(self.job):
            raise CredentialsError(
                f"the certificate in {self.certs} is for {identity}, which may not join job {self.job!r}; "
                f"make one with `shardnet certs issue --job {self.job}`, or use another folder"
            )
        return security

    @property
    def metrics_address(self) -> str:
        """host:port of this worker's metrics, different for each worker of its node; port 0 if the system should choose."""
        address = Address.parse(self.metrics)
        return str(address.with_port(address.port + self.local_rank) if address.port else address)

    @property
    def has_fixed_port(self) -> bool:
        """Whether `listen` or `advertise` says at which port, so that only one worker of a machine can have these settings."""
        return bool(self.advertise) or (bool(self.listen) and Address.parse(self.given_listen_address).port != 0)

    @property
    def given_listen_address(self) -> str:
        """host:port of `listen`, with port 0 if it has none; "" if that is not set."""
        if not self.listen:
            return ""
        has_port = (self.listen.startswith("[") and "]:" in self.listen) or self.listen.count(":") == 1
        return self.listen if has_port else str(Address(self.listen, 0))

    async def listen_address(self) -> str:
        """host:port to bind; port 0 if the system should choose. Waits until the rendezvous' name is known, up to `connect_s`."""
        return self.given_listen_address or str(Address(await self._local_address(), 0))

    async def public_address(self, bound: str) -> str:
        """The address where peers reach this worker: the bound one, unless that is 'all addresses' or `advertise` is set."""
        if self.advertise:
            return self.advertise
        address = Address.parse(bound)
        return str(Address(await self._local_address(), address.port)) if address.is_unspecified else bound

    async def _local_address(self) -> str:
        """The address of this machine from which it reaches the rendezvous."""
        target, begin_s, told = Address.parse(self.rendezvous), time.monotonic(), False
        problem: OSError = TimeoutError()
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                while True:
                    try:
                        return await _route_to(target)
                    except OSError as error:  # later the name may be known, or the network up
                        problem = error
                    if not told and time.monotonic() >= begin_s + PATIENCE_S:
                        log.warning("the rendezvous at %s cannot be reached yet: %s; trying again", target, problem.strerror)
                        told = True
                    await asyncio.sleep(RESOLVE_EVERY_S)
        except TimeoutError:
            if not isinstance(problem, socket.gaierror | TimeoutError):
                raise RendezvousUnavailable(f"this machine has no route to the rendezvous at {target}: {problem.strerror}") from None
            raise RendezvousUnavailable(
                f"the host name {target.host!r} of the rendezvous could not be resolved within {self.timeouts.connect_s:g} s; "
                "check the name, or give the IP address"
            ) from None


async def _route_to(target: Address) -> str:
    """The local address of the route to `target`. If `target` has several addresses, the first one that answers counts, or the first of all
    if none answers soon. Raises OSError while its name is unknown, or if there is no route."""
    loop = asyncio.get_running_loop()
    found = [(family, where) for family, *_, where in await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)]
    for family, where in found if len(found) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as caller, suppress(OSError):  # a timeout, too
            caller.setblocking(False)
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(caller, where)
            return str(caller.getsockname()[0])
    family, where = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # this sends no packet
        return str(probe.getsockname()[0])


def _parse(source: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except AddressError as error:
        raise AddressError(f"{source}: {error}") from None


def _timeouts(environment: Mapping[str, str]) -> Timeouts:
    try:
        return Timeouts.parse(environment.get("SHARDNET_TIMEOUTS", ""))
    except UsageError as error:
        raise UsageError(f"SHARDNET_TIMEOUTS: {error}") from None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, got {text!r}") from None
