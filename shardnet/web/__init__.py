"""A cluster as a web page: `watcher` looks, `story` keeps what was seen (for each job its `history`), `answer` makes the JSON, `page_port`
serves it, and `page/` draws it.

The scripts in `page/` put the data into the page as text, never as markup.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardnet.credentials import Security
from shardnet.web.page_port import PagePort
from shardnet.web.story import Story
from shardnet.web.watcher import Watcher

__all__ = ["page_of"]


@asynccontextmanager
async def page_of(address: str, listen: str, security: Security) -> AsyncIterator[str]:
    """Serve the page of the rendezvous at `address`; yields the URL to open in a browser. The rendezvous is watched all the time, so that a
    page that is opened late shows earlier events. Raises AddressError, PlaintextRefused or ListenError."""
    story = Story()
    async with PagePort(listen, story, insecure=security.insecure) as page, Watcher(address, story, security):
        yield page.url
