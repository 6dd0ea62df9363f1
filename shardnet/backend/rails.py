"""`Rails`: which ranks of a group talk across nodes; computed without communication, and equal on all ranks.

[Note: rails] If a fast engine moves data inside a node, data for other nodes goes along rails. There are as many rails as the largest node
has ranks. Rail j belongs to member j of every node: it carries their data. On a node of n ranks that has no member j, member j mod n
serves the rail. So each rank uses its node's link for its own share, and on a node with fewer ranks each of them may serve several rails.
"""

from dataclasses import dataclass
from typing import Self

from shardnet.collectives.route import Nodes


@dataclass(frozen=True, slots=True)
class Rails:
    """The rails of one group, as one of its ranks sees them. Ranks are the group's, members are places in a node."""

    nodes: Nodes
    here: int  # the index of this rank's node
    member: int  # this rank's place there

    @classmethod
    def of(cls, nodes: Nodes, rank: int) -> Self:
        """`nodes` holds each rank of the group once."""
        here = next(index for index, node in enumerate(nodes) if rank in node)
        return cls(nodes, here, nodes[here].index(rank))

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.nodes[self.here]

    @property
    def mine(self) -> list[int]:
        """The rails that this rank serves."""
        return [rail for rail in range(max(map(len, self.nodes))) if rail % len(self.node) == self.member]

    def servers(self, rail: int) -> list[int]:
        """The ranks that serve a rail, one of each node, in rank order."""
        return sorted(node[rail % len(node)] for node in self.nodes)

    def owners(self, rail: int) -> list[int | None]:
        """For each of a rail's `servers`, in the same order, the rank whose data it carries there; None if that node has no such member."""
        nodes = sorted(self.nodes, key=lambda node: node[rail % len(node)])
        return [node[rail] if rail < len(node) else None for node in nodes]

    def layers(self, node: int) -> list[tuple[int, ...]]:
        """The ranks of a node in layers. Of each layer every member of this rank's node takes one rank; of the last one perhaps none."""
        ranks, width = self.nodes[node], len(self.node)
        return [ranks[first : first + width] for first in range(0, len(ranks), width)]
