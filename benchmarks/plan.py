"""What is to be measured: sessions, each of them one set of worker processes."""

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shardnet.config import KIB, MIB


class Op(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    GATHER_ON_NODE = "gather_on_node"  # as FSDP gathers a unit: into one buffer per node; the peer runs an all_gather

    @property
    def counted_as(self) -> str:
        """The name under which a backend counts it."""
        return "all_gather" if self is Op.GATHER_ON_NODE else str(self)

    def moved_bytes(self, full_bytes: int, ranks: int) -> int:
        """What a ring sends, all ranks together: the least that any algorithm can do with equal load on all links."""
        return (ranks - 1) * full_bytes * (2 if self is Op.ALL_REDUCE else 1)


RUN_BYTES, MOST_CALLS = 64 * MIB, 20

COLLECTIVES = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)


class Transport(StrEnum):
    """What carries shardnet's data.

    GRPC  gRPC alone; on one machine each rank says that it is a node of its own
    MTLS  the same under mutual TLS, where the peer's is plaintext
    SHM   shared memory: all ranks are one node
    HIER  both: nodes of several ranks, direct collectives through memory inside them and a ring over gRPC across
    """

    GRPC = "grpc"
    MTLS = "grpc-mtls"
    SHM = "shm"
    HIER = "hier"


class Topology(StrEnum):
    """Where the ranks are. NETNS: each is a node in a network namespace of its own. NETNS_1GBIT: on two nodes, in two namespaces."""

    ONE_NODE = "one-node"
    NETNS = "netns"
    NETNS_1GBIT = "netns-1gbit"

    @property
    def ranks(self) -> int | None:
        """How many ranks there are, if the topology fixes that."""
        return 4 if self is Topology.NETNS_1GBIT else None

    def nodes(self, ranks: int) -> int:
        return {Topology.ONE_NODE: 1, Topology.NETNS: ranks, Topology.NETNS_1GBIT: 2}[self]

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that can carry data there."""
        match self:
            case Topology.ONE_NODE:
                return Transport.GRPC, Transport.MTLS, Transport.SHM
            case Topology.NETNS:
                return Transport.GRPC, Transport.MTLS
            case _:
                return (Transport.HIER,)

    def ops(self, transport: Transport) -> tuple[Op, ...]:
        """The collectives that are worth measuring there."""
        return tuple(Op) if transport is Transport.SHM else COLLECTIVES

    @property
    def rate(self) -> str | None:
        """The rate of each node's link in each direction, as tc writes it; None: no limit."""
        return "1gbit" if self is Topology.NETNS_1GBIT else None

    @property
    def link_bytes_per_s(self) -> float | None:
        """The link's rate for payload: a full segment is 1514 bytes on the link, 1448 of them payload. None: no limit."""
        return 1e9 / 8 * 1448 / 1514 if self.rate else None


@dataclass(frozen=True, slots=True)
class Case:
    """One collective of one size.

    bytes    size of the full tensor on a rank: gathered for all_gather, not yet reduced for the other two
    repeats  how often each engine runs it, besides the warm-up
    outstanding  how many of them are started before the first one is waited for; all of them are one run
    """

    op: Op
    bytes: int
    repeats: int
    outstanding: int = 1

    @property
    def calls(self) -> int:
        """How many calls, one after the other, make one run."""
        return calls_of(self.bytes) if self.outstanding == 1 else 1


@dataclass(frozen=True, slots=True)
class Collectives:
    """Cases that the same processes measure one after the other."""

    ranks: int
    topology: Topology
    transport: Transport
    chunk_bytes: int
    cases: tuple[Case, ...]
    explain: bool = False  # whether to find out where the time goes as well
    kind: str = "collective"  # of its rows


Compressed = Literal["int8", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Training:
    """Training steps of a GPT. Sizes as in workers/gpt.py; `batch` is the number of sequences of one rank.

    compressions  more trainings, each with weights sent as one of these ("int8" or "bfloat16") and gradients as int8
    kind          of its rows
    """

    ranks: int
    topology: Topology
    transport: Transport
    chunk_bytes: int
    steps: int
    dim: int
    layers: int
    heads: int
    context: int
    bigrams: int
    batch: int
    compressions: tuple[Compressed, ...] = ()
    kind: str = "step"


@dataclass(frozen=True, slots=True)
class Memory(Training):
    """The same training, to measure its memory: by one engine alone (`engine`), or by each engine in processes of its own."""

    engine: str = ""
    kind: str = "memory"


@dataclass(frozen=True, slots=True)
class Interop(Training):
    """torch's own collectives, and the same model trained by torch, over shardnet's process group and over gloo's.

    sizes    of the full tensor on a rank, in bytes
    repeats  of a collective; None: by its size
    """

    sizes: tuple[int, ...] = ()
    repeats: int | None = None
    kind: str = "interop"


Session = Collectives | Training


def calls_of(full_bytes: int) -> int:
    """How many collectives of a size make one run: several unless they are large, as a short run would rather show how a barrier ends."""
    return min(MOST_CALLS, max(1, RUN_BYTES // full_bytes))


def default_repeats(full_bytes: int, topology: Topology = Topology.ONE_NODE) -> int:
    """More for short, noisy runs, fewer for long ones; runs over a slow link are long and not noisy."""
    if topology.rate and full_bytes > MIB:
        return 5
    for limit, repeats in ((64 * KIB, 60), (MIB, 30), (16 * MIB, 15)):
        if full_bytes <= limit:
            return repeats
    return 9


def default_steps(topology: Topology) -> int:
    """Fewer where `make bench` would otherwise take too long for what they add."""
    return {Topology.ONE_NODE: 10, Topology.NETNS: 8, Topology.NETNS_1GBIT: 6}[topology]


def to_json(session: Session) -> str:
    """A session as text, for the command line of a worker."""
    return json.dumps({"session": type(session).__name__, **dataclasses.asdict(session)})


def from_json(text: str) -> Session:
    fields = json.loads(text)
    fields["transport"], fields["topology"] = Transport(fields["transport"]), Topology(fields["topology"])
    if (session := fields.pop("session")) != Collectives.__name__:
        fields |= {name: tuple(fields[name]) for name in ("sizes", "compressions") if name in fields}
        return {each.__name__: each for each in (Training, Memory, Interop)}[session](**fields)
    cases = tuple(Case(Op(case.pop("op")), **case) for case in fields.pop("cases"))
    return Collectives(**fields, cases=cases)
