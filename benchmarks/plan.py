"""What is to be measured: sessions, each of them one set of worker processes."""

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum

from shardnet.config import KIB, MIB


class Op(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"

    def moved_bytes(self, full_bytes: int, ranks: int) -> int:
        """What a ring sends, all ranks together: the least that any algorithm can do with equal load on all links."""
        return (ranks - 1) * full_bytes * (2 if self is Op.ALL_REDUCE else 1)


class Transport(StrEnum):
    """What carries shardnet's data. GRPC: each rank is a node of its own, though all are on this machine; SHM: all are one node."""

    GRPC = "grpc"
    SHM = "shm"


@dataclass(frozen=True, slots=True)
class Case:
    """One collective of one size.

    bytes    size of the full tensor on a rank: gathered for all_gather, not yet reduced for the other two
    repeats  how often each engine runs it, besides the warm-up
    """

    op: Op
    bytes: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """Cases that the same processes measure one after the other."""

    ranks: int
    transport: Transport
    chunk_bytes: int
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """Training steps of a GPT. Sizes as in workers/gpt.py; `batch` is the number of sequences of one rank."""

    ranks: int
    transport: Transport
    chunk_bytes: int
    steps: int
    dim: int
    layers: int
    heads: int
    context: int
    bigrams: int
    batch: int


Session = Collectives | Training


def default_repeats(full_bytes: int) -> int:
    """More for what is short and noisy, fewer for what takes long."""
    for limit, repeats in ((64 * KIB, 60), (MIB, 30), (16 * MIB, 15)):
        if full_bytes <= limit:
            return repeats
    return 9


def to_json(session: Session) -> str:
    """A session as text, for the command line of a worker."""
    return json.dumps({"kind": type(session).__name__, **dataclasses.asdict(session)})


def from_json(text: str) -> Session:
    fields = json.loads(text)
    fields["transport"] = Transport(fields["transport"])
    if fields.pop("kind") == Training.__name__:
        return Training(**fields)
    cases = tuple(Case(Op(case["op"]), case["bytes"], case["repeats"]) for case in fields.pop("cases"))
    return Collectives(**fields, cases=cases)
