"""`agree` and `confirm`: all ranks are in the same collective, and each knows that all others know it.

[Note: agreement] torch takes whatever each rank launches next for the same collective. If one rank gave up a collective that the others
launch, torch would pair two that do not belong together, and deliver wrong bytes. So no rank launches after announcements alone. Every rank
announces, waits for the announcements of all others, and then confirms that it has them; it launches when all others have confirmed. A rank
that fails before it has confirmed keeps everyone from launching, so its process group stays usable. A rank that fails later must throw its
process group away, because others may have launched. Which case applies depends only on what the rank itself has done, not on a message
that could be late. (A mismatch is found before confirming: a rank that hears of one while it waits for confirmations knows that no rank has
launched.)
"""

from collections.abc import Sequence

from shardnet.collectives.exchange import Disagreement
from shardnet.collectives.operation import Operation


async def agree(op: Operation, sends: Sequence[int] = (), expects: Sequence[int] = (), disagree: Disagreement | None = None) -> None:
    """Wait until all ranks have announced the collective; with `disagree` compare the bytes that each pair sends and expects.

    Raises CollectiveMismatch on all ranks if any two ranks do not match.
    """
    peers = op.group.peers
    for peer in peers:
        sizes = {} if disagree is None else {"sends": sends[peer], "expects": expects[peer]}
        await op.send(peer, announcement=op.announcement(**sizes))
    for peer in peers:
        theirs = await op.cleared(peer)
        if disagree is not None and theirs.send_bytes != expects[peer]:
            raise disagree(op, peer, op.group.rank, theirs.send_bytes, expects[peer])
        if disagree is not None and theirs.expect_bytes != sends[peer]:
            raise disagree(op, op.group.rank, peer, sends[peer], theirs.expect_bytes)


async def confirm(op: Operation, peers: Sequence[int] | None = None) -> None:
    """Tell the other ranks of the group, or only `peers`, that this rank has come this far, and wait until they have said the same."""
    peers = op.group.peers if peers is None else peers
    for peer in peers:
        await op.announce(peer)
    for peer in peers:
        await op.cleared(peer)
