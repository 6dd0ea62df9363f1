"""The page of a real rendezvous, which looks at its cluster by itself, with certificates and tokens too, and serves what it finds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.credentials.token import new_token
from shardnet.errors import ListenError, PlaintextRefused
from shardnet.observation.views import ClusterView
from shardnet.pb import stats_pb2
from shardnet.rendezvous.client import join
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.server import RendezvousServer
from shardnet.transport.endpoint import Endpoint
from shardnet.web import page_of
from shardnet.web.page_port import PagePort
from shardnet.web.story import Story
from shardnet.web.watcher import Watcher, reachable
from tests.credentials.made import security
from tests.http_calls import Answer, get
from tests.shared_loop import on_shared_loop

TIMEOUTS = Timeouts.for_tests()
HERE = "127.0.0.1:0"
TOKEN = new_token()
WAYS = {
    "plaintext": (Security(), Security()),
    "certificates": (security("meeting", Role.RENDEZVOUS), security("laptop", Role.WORKER)),
    "a token": (Security.find(Role.RENDEZVOUS, token=TOKEN), Security.find(Role.WORKER, token=TOKEN)),
}


def address_of(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/")


async def view(url: str, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await get(address_of(url), f"/view.json{query}")).body)
    return found


async def seen(url: str, state: str) -> dict[str, Any]:
    """Wait until the only worker is in this state, and return that view."""
    async with asyncio.timeout(20):
        while True:
            found = await view(url)
            if found["job"] is not None and [each["state"] for each in found["job"]["workers"]] == [state]:
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def worker(own: Security) -> AsyncIterator[Endpoint]:
    reply = stats_pb2.SnapshotReply(role="worker", world_size=1, step=7, progress=stats_pb2.Progress(step=7, loss=float("nan")))
    endpoint = Endpoint(HERE, limits=Limits(), timeouts=TIMEOUTS, snapshot=lambda: reply, security=own)
    async with endpoint:
        endpoint.set_serving(True)
        yield endpoint


@pytest.mark.parametrize("way", WAYS)
@on_shared_loop
async def test_a_rendezvous_may_ask_its_workers(way: str) -> None:
    of_rendezvous, of_worker = WAYS[way]
    async with (
        RendezvousServer(HERE, timeouts=TIMEOUTS, security=of_rendezvous) as server,
        page_of(server.address, HERE, of_rendezvous) as url,
        worker(of_worker) as endpoint,
    ):
        request = JoinRequest("lm", "w0", endpoint.address, "laptop", 1, 1)
        async with join(server.address, request, timeouts=TIMEOUTS, security=of_worker):
            found = await seen(url, "serving")
            assert found["job"]["workers"][0]["step"] == 7
            assert found["rendezvous"]["connections"] == ("plaintext" if way == "plaintext" else "mutual TLS")
            await endpoint.aclose()
            found = await seen(url, "unreachable")
            assert [what for _, _, what, _ in found["events"]][-1] == f"rank 0 ({endpoint.address}, laptop) is unreachable"


@on_shared_loop
async def test_what_is_known_is_not_told_again() -> None:
    async with (
        RendezvousServer(HERE, timeouts=TIMEOUTS) as server,
        page_of(server.address, HERE, Security()) as url,
        worker(Security()) as endpoint,
        join(server.address, JoinRequest("lm", "w0", endpoint.address, "laptop", 1, 1), timeouts=TIMEOUTS),
    ):
        first = await seen(url, "serving")
        query = f"?job=lm&run={first['run']}&since={first['number']}"
        assert (await view(url, query))["since"] == first["number"]
        for other in (query.replace("run=", "run=x"), query.replace("since=", "since=x"), query.replace("lm", "other"), ""):
            assert (await view(url, other))["since"] is None, other


@on_shared_loop
async def test_the_page_and_its_parts() -> None:
    async with PagePort(HERE, Story()) as port:
        address = address_of(port.url)
        page = await get(address, "/")
        assert page.fields["content-type"] == "text/html; charset=utf-8"
        for name, kind in (
            ("page.js", "text/javascript"),
            ("ring.js", "text/javascript"),
            ("style.css", "text/css"),
            ("icon.svg", "image/svg+xml"),
        ):
            part = await get(address, f"/{name}")
            assert (part.status, part.fields["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert (await get(address, "/view.json")).fields["content-type"] == "application/json"
        for path in ("/index.html", "/../web/story.py", "/page.js/", "/__init__.py"):
            assert (await get(address, path)).status == 404
        for answer in (
            page,
            await get(address, "/view.json"),
            await get(address, "/nothing"),
            await get(address, "/", host="evil.example"),
        ):
            check_fields(answer)


def check_fields(answer: Answer) -> None:
    """No foreign code runs in the page, no other site reads or frames it, and no cache keeps it."""
    policy = answer.fields["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.fields["x-content-type-options"] == "nosniff"
    assert answer.fields["cache-control"] == "no-store"
    assert not [name for name in answer.fields if name.startswith("access-control")]


@on_shared_loop
async def test_where_it_may_be() -> None:
    with pytest.raises(PlaintextRefused, match=r"the page at 0\.0\.0\.0:7080 would be open to everybody"):
        PagePort("0.0.0.0:7080", Story())
    async with PagePort("0.0.0.0:0", Story(), insecure=True) as port:
        assert "0.0.0.0" not in port.url, "nobody can call that"
        with pytest.raises(ListenError, match="another process already listens there"):
            await PagePort(f"127.0.0.1:{port.url.rstrip('/').rpartition(':')[2]}", Story()).start()
    assert PagePort(HERE, Story()).url == ""


def test_a_rendezvous_that_listens_everywhere_is_asked_here() -> None:
    assert [reachable(text) for text in ("0.0.0.0:7000", "[::]:7000", "10.0.0.1:7000")] == ["127.0.0.1:7000", "[::1]:7000", "10.0.0.1:7000"]


@on_shared_loop
async def test_a_look_that_fails_in_an_unforeseen_way_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    third = asyncio.Event()

    class Broken(Story):
        looks = 0

        def add(self, at_s: float, now_s: float, view: ClusterView) -> None:
            self.looks += 1
            if self.looks == 3:
                third.set()
            raise RuntimeError("something unforeseen")

    async with RendezvousServer(HERE, timeouts=TIMEOUTS) as server, Watcher(server.address, Broken(), Security(), interval_s=0.01):
        async with asyncio.timeout(20):
            await third.wait()
    assert f"the page could not be updated from the rendezvous at {server.address}" in caplog.text
    caplog.clear()
