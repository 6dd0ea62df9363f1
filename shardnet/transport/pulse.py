"""`Pulse`: whether the other end of a connection is alive.

[Note: two witnesses] A silent peer may be frozen or cut off; or something holds its interpreter lock for seconds and does not let
our thread run there, such as the loading of a large file, and the peer will be back. So silence alone counts only after `lost_s`. The
rendezvous notices the failure of a worker through grpcio, which answers pings without the interpreter: once the rendezvous takes a
silent worker for gone, `suspect_s` of silence is enough. The word of the rendezvous alone is not enough: it may have lost a worker that
its peers still reach. Where there is no rendezvous, other workers notice the failure in the same way (vigil.py). None of this is
needed for a process that dies, because its sockets close.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardnet.config import Timeouts
from shardnet.transport.http2 import Call

SILENT = "silent: it did not answer pings (frozen, or the network is cut)"
_ROUNDS = 4  # pings in `suspect_s`


class Pulse:
    """Pings over one connection; see [Note: two witnesses].

    Silence is counted in rounds rather than in time: if it was this process that stood still, a late round counts as one round.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._interval_s = timeouts.suspect_s / _ROUNDS
        self._patience = self._usual_patience = max(_ROUNDS, round(timeouts.lost_s / self._interval_s))
        self._silent = 0  # rounds

    @property
    def is_silent(self) -> bool:
        """Whether a ping has not been answered for a round. Sending data now would hide the silence, because an acknowledgement by the
        peer's system counts as a sign of life."""
        return self._silent > 1

    def suspect(self) -> None:
        """Another witness has lost the peer."""
        self._patience = _ROUNDS

    def trust(self) -> None:
        """The other witness has found the peer again."""
        self._patience = self._usual_patience

    @asynccontextmanager
    async def beating(self, call: Call) -> AsyncIterator[None]:
        """Watch the call while the body runs."""
        task = asyncio.get_running_loop().create_task(self._watch(call))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _watch(self, call: Call) -> None:
        """Ping while nothing is heard; close the call when the silence lasts too long."""
        self._silent, heard = 0, call.signs_of_life
        while self._silent <= self._patience:
            await asyncio.sleep(self._interval_s)
            before, heard = heard, call.signs_of_life
            self._silent = self._silent + 1 if heard == before else 0
            if self._silent:
                call.ping()
        call.close(SILENT)
