"""`Seat`: a place in one epoch of a cluster."""

from shardnet.backend.base import Backend
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import Membership
from shardnet.topology import Topology
from shardnet.training.last_words import LastWords


class Seat:
    """A backend to the ranks of one epoch, and the membership that gave this process its rank; thrown away when any member changes."""

    def __init__(self, backend: Backend, topology: Topology, membership: Membership | None = None) -> None:
        """`membership` is None if no rendezvous is used; the backend and the membership are closed with the seat."""
        self.backend = backend
        self.topology = topology
        self.membership = membership

    @property
    def joiners(self) -> int:
        """How many workers wait to join in the next epoch."""
        return 0 if self.membership is None else self.membership.joiners

    @property
    def spares(self) -> int:
        """How many workers wait for a place."""
        return 0 if self.membership is None else self.membership.spares

    async def leave(self, words: LastWords | None = None) -> None:
        """Say goodbye to the peers and then to the rendezvous. With last words, say no goodbye: they take this rank for lost at once, and
        know why."""
        # dropped: code that still holds the cluster would keep the connection
        membership, self.membership = self.membership, None
        try:
            if words is None:
                await self.backend.aclose()
            else:
                self.backend.abort(words.text)
        finally:
            try:
                if membership is not None:
                    await end_membership(membership, goodbye=words is None, words=words)
            finally:
                await self.backend.aclose()  # only now after an abort: the words go out while the rendezvous is told

    async def abandon(self) -> Membership | None:
        """Close the backend, with a goodbye to the peers unless it was aborted. The membership is the caller's to end."""
        await self.backend.aclose()
        membership, self.membership = self.membership, None
        return membership


async def begin_membership(membership: Membership) -> None:
    """Join, from any loop. If that is cancelled, or fails, the membership has ended."""
    try:
        await LoopThread.shared().run_here(membership.__aenter__())
    except BaseException:  # cancelled too late: this process may have a place by now
        await end_membership(membership, goodbye=False)
        raise


async def end_membership(membership: Membership, *, goodbye: bool, words: LastWords | None = None) -> None:
    """End a membership: without a goodbye if its epoch has failed, or if another membership has followed it; then perhaps with last
    words."""

    async def end() -> None:
        try:
            if words is not None:
                await membership.fail(words.text, follows=words.follows)
            elif not goodbye:
                membership.abort()
        finally:
            await membership.aclose()

    await LoopThread.shared().run_here(end())
