"""`NodeGrid`: ranks on several nodes, equally many on each, arranged by node and by place within it."""

from dataclasses import dataclass

from shardnet.backend import Backend


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """One rank's view of the grid: a row is a node, a column has one rank of each node."""

    inside: Backend  # this rank's row
    across: Backend  # this rank's column
    columns: tuple[tuple[int, ...], ...]  # the group's ranks: one tuple for each place, nodes in order

    @classmethod
    def of(cls, ranks: Backend) -> "NodeGrid | None":
        """The grid of these ranks. None where there is nothing to divide: on one node, on nodes of one rank, and on nodes with unequal
        numbers of ranks."""
        nodes = ranks.node_ranks
        if len(nodes) == 1 or len(nodes[0]) == 1 or len({len(node) for node in nodes}) != 1:
            return None
        node = next(node for node in nodes if ranks.rank in node)
        columns = tuple(zip(*nodes, strict=True))
        return cls(ranks.subgroup(node), ranks.subgroup(columns[node.index(ranks.rank)]), columns)
