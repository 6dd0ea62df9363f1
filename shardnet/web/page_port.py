"""`PagePort`: the page, on a port of its own."""

import contextlib
import json
import socket
from importlib.resources import files
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs

from shardnet.address import Address
from shardnet.transport.http_port import HttpPort, Request, Response, Route
from shardnet.web.answer import answer
from shardnet.web.story import Story

_EXAMPLE = "127.0.0.1:7080"
VIEW = "/view.json"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FIELDS = {
    # Load nothing from other sites, run no inline code, and allow no other page to frame this one.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class PagePort:
    """Serves the page of a story; an async context manager. Lives on the loop that enters it, as long as the story is added to."""

    def __init__(self, listen: str, story: Story, *, insecure: bool = False) -> None:
        """insecure: it may be open to other machines. Raises AddressError or PlaintextRefused; opens nothing yet."""
        self._story = story
        routes = {VIEW: self._view, **_pages()}
        names = (socket.gethostname(),)
        self._port = HttpPort(listen, routes, what="the page", example=_EXAMPLE, insecure=insecure, names=names, fields=_FIELDS)

    @property
    def url(self) -> str:
        """The URL to open in a browser; empty before it is open."""
        bound = self._port.bound
        if bound is None:
            return ""
        return f"http://{Address(socket.gethostname(), bound.port) if bound.is_unspecified else bound}/"

    async def start(self) -> None:
        """Bind and answer. Raises ListenError, and leaves nothing open then."""
        await self._port.start()

    async def aclose(self) -> None:
        """Close everything at once. Safe to call twice, or without a start."""
        await self._port.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _view(self, request: Request) -> Response:
        """Answer `?job=NAME&run=RUN&since=NUMBER`; without these, or with unknown values, everything about some job."""
        asked = {name: values[-1] for name, values in parse_qs(request.query).items()}
        since: int | None = None
        if asked.get("run") == self._story.run:
            with contextlib.suppress(ValueError):
                since = int(asked.get("since", ""))
        told = answer(self._story, asked.get("job", ""), since)
        return Response(json.dumps(told, separators=(",", ":"), allow_nan=False).encode(), "application/json")


def _pages() -> dict[str, Route]:
    """The files of `page/`, read once: `index.html` is at `/`."""
    found: dict[str, Route] = {}
    for file in (files("shardnet.web") / "page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = _static(Response(file.read_bytes(), f"{kind}; charset=utf-8"))
    return found


def _static(response: Response) -> Route:
    async def tell(_: Request) -> Response:
        return response

    return tell
