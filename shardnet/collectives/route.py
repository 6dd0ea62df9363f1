"""The way that the blocks of a collective take over the nodes of a group; computed without communication, and equal on all ranks.

Every block has an owner. On each other node one rank carries it: the rank that has the same place there as the owner has on its own node
(modulo the node's size), so that each of a node's ranks carries a part. Around the ring of nodes a block goes from carrier to carrier.
"""

from dataclasses import dataclass
from enum import StrEnum

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each node


class Routing(StrEnum):
    """What a group's collectives treat as a node. It is the same for all ranks of a cluster."""

    AUTO = "auto"  # each real node: direct inside, a ring across
    RING = "ring"  # each rank by itself: one ring of all ranks
    DIRECT = "direct"  # all ranks together: everyone to everyone
    RANK_ORDER = "rank-order"  # the same, and each sum begins with rank 0 and ends with the last rank

    def cut(self, nodes: Nodes) -> Nodes:
        ranks = sorted(rank for node in nodes for rank in node)
        match self:
            case Routing.RING:
                return tuple((rank,) for rank in ranks)
            case Routing.DIRECT | Routing.RANK_ORDER:
                return (tuple(ranks),)
            case _:
                return nodes


@dataclass(frozen=True, slots=True)
class Leg:
    """One block's way past one rank."""

    hops: int  # number of steps around the ring from the owner's node to this one
    carrier: int  # the rank that carries the block on this node; on the owner's node that is the owner
    before: int  # the carrier on the previous node
    behind: int  # the carrier on the next node


@dataclass(frozen=True, slots=True)
class Route:
    """All blocks' ways past one rank."""

    neighbours: tuple[int, ...]  # the other ranks of its node, beginning after this one, so that not all send to the same one first
    node: tuple[int, ...]  # all ranks of the node in the same order, this rank last
    nodes: int  # how many
    largest: int  # the most ranks on any node
    legs: tuple[Leg, ...]  # one per block, in the order of the owners

    @property
    def is_ring(self) -> bool:
        """Whether there are several nodes, and every rank is one."""
        return self.nodes == len(self.legs) > 1

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, one of them with several ranks."""
        return 1 < self.nodes < len(self.legs)

    def __str__(self) -> str:
        """The way of large collectives, in words for a user."""
        if self.is_hierarchical:
            most = "" if self.nodes * self.largest == len(self.legs) else "up to "
            return f"hierarchical: a ring of {self.nodes} nodes, direct inside each ({most}{self.largest} ranks)"
        if len(self.legs) == 1:
            return "none: there is only one rank"
        return f"a ring of {self.nodes} ranks" if self.is_ring else f"direct between {self.largest} ranks"

    @classmethod
    def of(cls, nodes: Nodes, rank: int) -> "Route":
        """`nodes` holds each rank of the group once, and none is empty."""
        here = next(index for index, node in enumerate(nodes) if rank in node)
        place = nodes[here].index(rank)
        neighbours = nodes[here][place + 1 :] + nodes[here][:place]
        homes = {owner: (home, index) for home, node in enumerate(nodes) for index, owner in enumerate(node)}
        legs = tuple(_leg(nodes, here, *homes[owner]) for owner in sorted(homes))
        return cls(neighbours, (*neighbours, rank), len(nodes), max(map(len, nodes)), legs)


def _leg(nodes: Nodes, here: int, home: int, place: int) -> Leg:
    def carrier(node: int) -> int:
        ranks = nodes[node % len(nodes)]
        return ranks[place % len(ranks)]

    return Leg((here - home) % len(nodes), carrier(here), carrier(here - 1), carrier(here + 1))
