"""What the commands need of the cluster: a rendezvous of their own, its page, and a worker's progress."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from shardnet.config import Timeouts
from shardnet.credentials import Security
from shardnet.observation.replies import read_progress
from shardnet.rendezvous.server import RendezvousServer
from shardnet.telemetry import Progress
from shardnet.transport.observe import snapshot

PROGRESS_TIMEOUT_S = 2.0  # a busy worker answers late; a bar that stands still for longer says so by itself
CLOSE_S = 0.2  # the workers are gone when a local rendezvous closes: nobody's goodbye is waited for


@asynccontextmanager
async def with_page(server: RendezvousServer, web: str | None, security: Security) -> AsyncIterator[str]:
    """The rendezvous, open, and its page, if `web` says where; yields what to open in a browser, or nothing.

    Raises ListenError for either, and PlaintextRefused for a page off this machine.
    """
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        if web is None:
            yield ""
            return
        from shardnet.web import page_of  # nobody waits for it who does not want it

        yield await stack.enter_async_context(page_of(server.address, web, security))


@asynccontextmanager
async def local_rendezvous(
    security: Security, web: str | None = None, say: Callable[[str], None] = print
) -> AsyncIterator[RendezvousServer]:
    """A rendezvous for the workers of this machine alone, on a port that the system chooses. `say` is told where its page is, if there is
    one. Raises like `with_page`."""
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts(drain_s=CLOSE_S), security=security)
    async with with_page(server, web, security) as page:
        if page:
            say(f"page at {page}")
        yield server


async def worker_progress(address: str, *, security: Security) -> Progress:
    """What the worker's program reported last; raises EndpointUnavailable, HandshakeError or ProtocolError."""
    reply = await snapshot(address, timeout_s=PROGRESS_TIMEOUT_S, security=security)
    return read_progress(reply.progress)
