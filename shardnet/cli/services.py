"""Services that the commands need: a rendezvous of their own, its page, and what a worker says of itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from shardnet.config import Timeouts
from shardnet.credentials import Security
from shardnet.observation.replies import read_stats
from shardnet.observation.views import Stats
from shardnet.rendezvous.server import RendezvousServer
from shardnet.transport.observe import snapshot

PROGRESS_TIMEOUT_S = 2.0  # a busy worker answers late; for longer delays a bar that stands still says enough
CLOSE_S = 0.2  # the workers are gone when a local rendezvous closes: it waits for no goodbyes


@asynccontextmanager
async def with_page(server: RendezvousServer, web: str | None, security: Security) -> AsyncIterator[str]:
    """Open the rendezvous, and its page if `web` says where; yields the URL to open in a browser, or an empty text.

    Raises ListenError for either, and PlaintextRefused for a page off this machine.
    """
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        if web is None:
            yield ""
            return
        from shardnet.web import page_of  # imported only if it is wanted

        yield await stack.enter_async_context(page_of(server.address, web, security))


@asynccontextmanager
async def local_rendezvous(
    security: Security, web: str | None = None, say: Callable[[str], None] = print
) -> AsyncIterator[RendezvousServer]:
    """A rendezvous for the workers of this machine alone, on a port that the system chooses. `say` gets a line with the URL of its page, if
    there is one. Raises like `with_page`."""
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts(drain_s=CLOSE_S), security=security)
    async with with_page(server, web, security) as page:
        if page:
            say(f"page at {page}")
        yield server


async def worker_stats(address: str, *, security: Security) -> Stats:
    """What the worker says of itself; raises EndpointUnavailable, HandshakeError or ProtocolError."""
    return read_stats(await snapshot(address, timeout_s=PROGRESS_TIMEOUT_S, security=security))
