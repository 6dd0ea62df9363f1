"""Which way the bytes of a training go: the workers' own counts, compared with the network interfaces of their containers."""

from dataclasses import dataclass
from typing import Any, Self

from compose_test.cluster import Cluster
from compose_test.console import Failure, say
from compose_test.engine import run

MIB = 2**20
INSIDE_MOST = 0.02  # at most this share of a node's own bytes may go over the network: control messages and tiny data
WIRE_MOST = 1.25  # times the payload: TLS, HTTP/2, TCP and control messages come on top


@dataclass(frozen=True)
class Interfaces:
    """Bytes that a container has sent over loopback, and over all other interfaces."""

    loopback: int
    wire: int

    @classmethod
    def of(cls, container: str) -> Self:
        sent: dict[str, int] = {}
        for line in run("docker", "exec", container, "cat", "/proc/net/dev").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            sent[name.strip()] = int(numbers.split()[8])
        return cls(sent.pop("lo"), sum(sent.values()))


@dataclass(frozen=True)
class Payload:
    """Bytes that the ranks of a node have sent in this epoch.

    memory  to ranks of the node, through memory
    inside  to ranks of the node, over the network
    across  to other nodes, over the network
    shared  to other nodes, through memory
    """

    memory: int
    inside: int
    across: int
    shared: int

    @classmethod
    def of(cls, container: str, workers: list[dict[str, Any]]) -> Self:
        memory = inside = across = shared = 0
        for stats in (worker["stats"] for worker in workers if worker["node"].startswith(container[:12])):
            groups = stats["node_groups"]
            for peer, traffic in stats["peers"].items():
                if groups[int(peer)] == groups[stats["rank"]]:
                    memory, inside = memory + traffic["sent_memory"], inside + traffic["sent_network"]
                else:
                    shared, across = shared + traffic["sent_memory"], across + traffic["sent_network"]
        return cls(memory, inside, across, shared)

    def since(self, before: "Payload") -> "Payload":
        return Payload(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Reading:
    """One node's counters. Asking the workers takes a while, so the interfaces are read before and after."""

    early: Interfaces
    payload: Payload
    late: Interfaces


def read(cluster: Cluster) -> dict[str, Reading]:
    """A reading of each node, by container. Raises Failure if a worker does not answer, or says that its connections are not encrypted."""
    nodes = cluster.nodes
    early = [Interfaces.of(container) for container in nodes]
    workers = cluster.status()["workers"]
    late = [Interfaces.of(container) for container in nodes]
    for worker in workers:
        if not worker["stats"]:
            raise Failure(f"rank {worker['rank']} is {worker['state']} while it trains")
        if worker["stats"]["connections"] != "mutual TLS":
            raise Failure(f"connections of rank {worker['rank']} are {worker['stats']['connections']}, not mutual TLS")
    return {node: Reading(first, Payload.of(node, workers), last) for node, first, last in zip(nodes, early, late, strict=True)}


def check(container: str, before: Reading, after: Reading) -> None:
    """Check what a node has sent in between. Raises Failure for bytes that took the wrong way."""
    sent = after.payload.since(before.payload)
    loopback, wire_most = after.late.loopback - before.early.loopback, after.late.wire - before.early.wire
    wire_least = after.early.wire - before.late.wire
    say(
        f"node {container[:12]} sent its own ranks {sent.memory / MIB:.1f} MiB through memory ({sent.inside / MIB:.2f} over gRPC; "
        f"on loopback at most {loopback / MIB:.2f} in all), the other node {sent.across / MIB:.1f} MiB over gRPC under TLS "
        f"({sent.shared} bytes through memory; on its network {wire_least / MIB:.1f} to {wire_most / MIB:.1f} in all)"
    )
    if not sent.memory or not sent.across:
        raise Failure("they train, and yet the ranks of a node send each other nothing through memory, or the other node nothing")
    if max(sent.inside, loopback) > INSIDE_MOST * sent.memory:
        raise Failure(f"ranks of one node talk over the network: more than {INSIDE_MOST:.0%} of what they send each other")
    if sent.shared:
        raise Failure("ranks of different nodes share memory")
    if wire_most < sent.across:
        raise Failure("what goes between nodes does not go over their network")
    if wire_least > WIRE_MOST * sent.across:
        raise Failure(f"more goes over the network than {WIRE_MOST:g} times of what goes between nodes")
