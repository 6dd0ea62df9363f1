"""`Rails`: which ranks of a group talk across nodes; pure, and equal on all ranks.

[Note: rails] Where a fast engine moves data inside a node, what goes across goes along rails. There are as many as the largest node
has ranks. Rail j belongs to the members j of all nodes: it carries what is theirs. On a node that has no member j another one serves the
rail, member j mod n of n. So each rank uses its node's link for its own share, and a node that has few ranks serves several rails with
each.
"""

from dataclasses import dataclass
from typing import Self

from shardnet.collectives.route import Nodes


@dataclass(frozen=True, slots=True)
class Rails:
    """Those of one group, as one of its ranks sees them. Ranks are the group's, members are places in a node."""

    nodes: Nodes
    here: int  # its node
    member: int  # its own place there

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
        """Who serves a rail, a rank of each node, in rank order."""
        return sorted(node[rail % len(node)] for node in self.nodes)

    def owners(self, rail: int) -> list[int | None]:
        """Whose data a rail carries for each who serves it, in the same order; None where a node has no such member."""
        nodes = sorted(self.nodes, key=lambda node: node[rail % len(node)])
        return [node[rail] if rail < len(node) else None for node in nodes]

    def layers(self, node: int) -> list[tuple[int, ...]]:
        """The ranks of a node in pieces, of which each member of this rank's node takes one or, at the end, none."""
        ranks, width = self.nodes[node], len(self.node)
        return [ranks[first : first + width] for first in range(0, len(ranks), width)]
