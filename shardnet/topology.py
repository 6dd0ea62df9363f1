"""The ranks, nodes and addresses of one membership epoch."""

from dataclasses import dataclass

from shardnet.errors import InvalidRankError, InvalidWorldSizeError


@dataclass(frozen=True, slots=True)
class Member:
    """One worker, as the rendezvous placed it."""

    rank: int
    local_rank: int  # 0-based within its node
    node_group: int  # 0-based index of its node
    address: str  # host:port
    node: str  # identity of the host
    incarnation: str  # new at every start
    identity: str = ""  # the identity that its certificate has proved: a URI (credentials/identity.py); empty without TLS


@dataclass(frozen=True, slots=True)
class Topology:
    """The members of one epoch by rank, as seen by one of them. Raises InvalidWorldSizeError or InvalidRankError."""

    epoch: int
    rank: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise InvalidWorldSizeError
        if not 0 <= self.rank < len(self.members):
            raise InvalidRankError(self.rank, len(self.members))

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def me(self) -> Member:
        return self.members[self.rank]

    def node_ranks(self, node_group: int) -> tuple[int, ...]:
        """The ranks of one node, ascending."""
        return tuple(m.rank for m in self.members if m.node_group == node_group)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The other ranks of this rank's node."""
        return tuple(rank for rank in self.node_ranks(self.me.node_group) if rank != self.rank)

    @property
    def node_count(self) -> int:
        return len({m.node_group for m in self.members})
