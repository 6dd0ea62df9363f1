"""`agree` and `confirm`: all ranks are in the same collective, and each knows that all others know it.

[Note: agreement] torch takes whatever is launched next on each rank for the same collective: where one rank had given up what others have
launched it would pair what does not belong together, and bring wrong bytes. So nothing is launched on the first word. Every rank
announces, hears all others, and then says that it has: who has heard that from all may launch. A rank that fails before it has said
so keeps everyone from launching, so its process group stays good; one that fails later must throw its process group away, for
others may have launched. Either follows from what the rank itself has done, and from no message that could be late. (A mismatch is found
before it is said: who hears of one while it waits for the word of all knows that nobody has launched.)
"""

from collections.abc import Sequence

from shardnet.collectives.exchange import Disagreement
from shardnet.collectives.operation import Operation


async def agree(op: Operation, sends: Sequence[int] = (), expects: Sequence[int] = (), disagree: Disagreement | None = None) -> None:
    """Wait until all ranks have announced the collective; with `disagree` compare the bytes that each pair sends and expects.

    Raises CollectiveMismatch on all ranks if two do not fit together.
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
    """Say that this rank has come so far, and wait until all have said so, or all of `peers`, ranks of the group."""
    peers = op.group.peers if peers is None else peers
    for peer in peers:
        await op.announce(peer)
    for peer in peers:
        await op.cleared(peer)
