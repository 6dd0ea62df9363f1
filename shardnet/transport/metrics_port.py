"""`MetricsPort`: statistics by HTTP, for Prometheus and other tools that read its text format."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from shardnet.errors import UsageError
from shardnet.transport.http_port import HttpPort, Request, Response
from shardnet.transport.stats_service import Snapshot

log = logging.getLogger(__name__)

PATH = "/metrics"


class MetricsPort:
    """Answers `GET /metrics`, and nothing else. An async context manager that lives as long as its process has its role.

    Everything runs on the loop that enters it, except the making of the text, which takes milliseconds and runs on a thread.
    """

    def __init__(self, listen: str, snapshot: Snapshot, *, insecure: bool = False) -> None:
        """Opens nothing yet. Raises AddressError, PlaintextRefused, or UsageError if the library is not installed."""
        self._port = HttpPort(listen, {PATH: self._answer}, what="metrics", example="127.0.0.1:9464", insecure=insecure)
        try:
            from shardnet.transport.metrics import render
        except ImportError as error:
            raise UsageError(
                "metrics need the package prometheus_client: install shardnet[metrics], or leave them off (--metrics, SHARDNET_METRICS, "
                "connect(metrics=...)); shardnet.v1.Stats and `shardnet status` give the same numbers"
            ) from error
        self._render = render
        self._snapshot = snapshot
        self._writer: ThreadPoolExecutor | None = None  # makes the text; owned

    @property
    def url(self) -> str:
        """The URL to scrape; empty before it is open."""
        return self._port.url and f"{self._port.url}{PATH}"

    async def start(self) -> None:
        """Bind and answer. Raises ListenError, and leaves nothing open then."""
        await self._port.start()
        self._writer = ThreadPoolExecutor(1, "shardnet-metrics")
        log.info("metrics at %s", self.url)

    async def aclose(self) -> None:
        """Close everything at once. Safe to call twice, or without a start."""
        await self._port.aclose()
        if self._writer is not None:
            self._writer.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _answer(self, request: Request) -> Response:
        accept = str(request.fields.get("accept", ""))
        assert self._writer is not None
        text, kind = await asyncio.get_running_loop().run_in_executor(self._writer, self._render, self._snapshot(), accept)
        return Response(text, kind)
