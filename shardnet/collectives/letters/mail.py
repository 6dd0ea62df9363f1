"""`Mail`: how the ranks of a group leave each other letters (see [Note: rounds] in round.py)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardnet.transport.shared_memory import Mailbox, MailboxView

if TYPE_CHECKING:
    from shardnet.collectives.group import Group
    from shardnet.collectives.letters.attendant import Attendant

SPIN_S = 0.0002  # longer than the ranks of a busy node are usually apart; halved whenever spinning was in vain, down to the next one
LEAST_SPIN_S = 0.00001


class Mail:
    """One group's access to each other member's mailbox; all members are on this node. Safe to use from any thread."""

    def __init__(
        self, group: "Group", mailbox: Mailbox, views: Mapping[int, MailboxView], attendant: "Attendant", processes: Mapping[int, int]
    ) -> None:
        """views      by rank of the group
        processes  by rank of the group, for those ranks whose memory can be read; all of them or none
        """
        limits = group.board.limits
        self.largest = min(limits.letter_bytes, limits.direct_bytes)  # the most bytes of data that a letter may have
        self.group = group
        self.mailbox = mailbox
        self.views = dict(views)
        self.readers = tuple(views.values())
        self.peers = tuple(group.members[rank] for rank in views)
        self.attendant = attendant
        self.processes = processes
        self.spin_s = SPIN_S

    @property
    def lends(self) -> bool:
        """Whether letters may say where data is, because all members can read each other's memory."""
        return bool(self.processes)

    def take_back(self, sequence: int) -> None:
        """Withdraw the letter of a round that has failed, here or elsewhere: a rank that has yet to read it must not use it."""
        self.mailbox.withdraw(self.group.id, sequence)

    def wake(self, rank: int) -> None:
        """Wake whoever waits for another rank: something has come from it by another way than its mailbox."""
        self.views[rank].wake()
        self.attendant.summon()

    def learn(self, *, in_vain: bool) -> None:
        """Adapt how long to look without sleeping to whether that was in vain."""
        self.spin_s = max(self.spin_s / 2, LEAST_SPIN_S) if in_vain else min(self.spin_s * 2, SPIN_S)
