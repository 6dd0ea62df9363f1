"""`NodeGrid`: ranks on several nodes, as many on each, by node and by place."""

from dataclasses import dataclass

from shardnet.backend import Backend


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """One rank's view of it: a row is a node, a column is one rank of each."""

    inside: Backend  # this rank's row
    across: Backend  # this rank's column
    columns: tuple[tuple[int, ...], ...]  # ranks of the group that is cut so; by place, nodes in order

    @classmethod
    def of(cls, ranks: Backend) -> "NodeGrid | None":
        """None where there is nothing to cut: on one node, on nodes of one rank, and on nodes that have not all as many."""
        nodes = ranks.node_ranks
        if len(nodes) == 1 or len(nodes[0]) == 1 or len({len(node) for node in nodes}) != 1:
            return None
        node = next(node for node in nodes if ranks.rank in node)
        columns = tuple(zip(*nodes, strict=True))
        return cls(ranks.subgroup(node), ranks.subgroup(columns[node.index(ranks.rank)]), columns)
