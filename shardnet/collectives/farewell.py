"""`Farewell`: when a rank can forget a group.

[Note: left groups] A program may make groups again and again. When a group has ended on a rank, or no object there refers to it any more,
and all that was begun in it has ended, the rank says so to the others. When it has heard that from all of them, no message or question can
come any more, and it keeps only the ids of the group and its channels. Until then others may read its letters, and ask how far it is.
"""

from typing import TYPE_CHECKING

from shardnet.pb.mesh_pb2 import Control, GroupOver

if TYPE_CHECKING:
    from shardnet.collectives.group import Group


class Farewell:
    """One group's; lives as long as it. Runs on the loop thread."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._is_left = False  # this rank begins nothing in it any more
        self._is_said = False  # and what was begun has ended, and the others have been told
        self._heard_of = set[int]()  # the other ranks that have said the same

    def leave(self) -> None:
        """Note that this rank begins nothing in it any more."""
        self._is_left = True
        if not self._group.party.channel:  # channels go with their group
            self._group.board.leave(self._group)

    def hear(self, peer: int) -> None:
        """Handle a peer's word that it has no use for the group any more."""
        self._heard_of.add(peer)
        self._group.board.settle(self._group)

    def settle(self) -> bool:
        """Tell the others if this rank has no use for it any more; return whether no rank has."""
        group = self._group
        if not self._is_said:
            at_rest = all(each.is_at_rest for each in (group, *group.channels.groups))
            self._is_said = self._is_left and at_rest and all(map(self._is_lost, group.first_contact.missing))
            for peer in group.peers if self._is_said else ():
                group.tell(peer, 0, Control(group_over=GroupOver()))
        return self._is_said and all(peer in self._heard_of or self._is_lost(peer) for peer in group.peers)

    def _is_lost(self, peer: int) -> bool:
        return self._group.members[peer] in self._group.board.lost
