"""Callers without a valid certificate at a port that demands one: no handler runs, one log line says who and why, and the caller is told
the same."""

import asyncio
import logging
import re
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Credentials, Identity, Role, Security
from shardnet.credentials.authority import key_pem
from shardnet.errors import EndpointUnavailable, HandshakeError
from shardnet.pb import stats_pb2
from shardnet.transport.admission import Admission
from shardnet.transport.dialing import dial
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.observe import Health, health, snapshot
from tests.credentials.made import authority, credentials, security
from tests.shared_loop import on_shared_loop

TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()


class Host:
    """A worker's endpoint, and what callers have made it do."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.handled = 0

    def snapshot(self) -> stats_pb2.SnapshotReply:
        self.handled += 1
        return stats_pb2.SnapshotReply(role="worker")

    @property
    def address(self) -> str:
        return self.endpoint.address


@asynccontextmanager
async def worker(protection: Security) -> AsyncIterator[Host]:
    host: Host
    endpoint = Endpoint("127.0.0.1:0", limits=LIMITS, timeouts=TIMEOUTS, snapshot=lambda: host.snapshot(), security=protection)
    host = Host(endpoint)
    endpoint.add_mesh(MeshService(TIMEOUTS))
    async with endpoint:
        yield host


def expired() -> Credentials:
    return _good_between(-2, -1)


def early() -> Credentials:
    return _good_between(1, 2)


def _good_between(first: int, last: int) -> Credentials:
    """A worker's certificate that is good between these days, counted from now."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    uri, name = x509.UniformResourceIdentifier("shardnet:worker:lm:n"), x509.DNSName("member.shardnet")
    certificate = (
        x509.CertificateBuilder(authority().certificate.subject, x509.Name([]), key.public_key(), 1)
        .not_valid_before(now + timedelta(days=first))
        .not_valid_after(now + timedelta(days=last))
        .add_extension(x509.SubjectAlternativeName([uri, name]), critical=False)
        .sign(authority().key, hashes.SHA256())
    )
    return Credentials(Identity(Role.WORKER, "n", "lm"), authority().pem, certificate.public_bytes(Encoding.PEM), key_pem(key))


class Nameless(Credentials):
    """Credentials that trust the authority, but show no certificate."""

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.set_alpn_protocols(["h2"])
        context.load_verify_locations(cadata=self.authority.decode())
        return context

    def for_grpcio(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority)


def nameless() -> Credentials:
    known = credentials()
    return Nameless(known.identity, known.authority, known.certificate, known.key)


@pytest.mark.parametrize(
    ("stranger", "line", "told"),
    [
        (nameless, "it sent no certificate", "it requires a certificate of this process, which has sent none"),
        (
            lambda: credentials(by="another"),
            "it does not trust the authority of this process's certificate",  # the caller looked first
            "its certificate is not one of this cluster's",
        ),
        (
            expired,
            "its certificate has expired by this machine's clock; compare the clocks of both machines",
            "it considers this process's certificate expired",
        ),
        (
            early,
            "its certificate is not valid yet by this machine's clock; compare the clocks of both machines",
            "it does not accept this process's certificate, which may not be valid yet by its clock",
        ),
    ],
    ids=["no certificate", "wrong authority", "expired", "early"],
)
@on_shared_loop
async def test_who_is_not_let_in(
    stranger: Callable[[], Credentials], line: str, told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardnet.transport.throttle.EVERY_S", 0.0)  # so that each refusal gets its own line
    async with worker(security()) as host:
        with caplog.at_level(logging.WARNING), pytest.raises(HandshakeError, match=re.escape(told)) as caught:
            await snapshot(host.address, security=Security(credentials=stranger()))
        assert str(caught.value).startswith(f"{host.address} and this process do not trust each other: ")
        assert host.handled == 0
    lines = {re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", record.getMessage()) for record in caplog.records}
    assert f"refused a connection from ADDRESS: {line}" in lines
    assert all(each.startswith("refused a connection from ADDRESS: ") for each in lines)


@on_shared_loop
async def test_a_trusted_caller_that_another_authority_signed(caplog: pytest.LogCaptureFixture) -> None:
    """It trusts us, but shows a certificate of another authority: so only the callee can notice."""
    mine, theirs = credentials(), credentials(by="another")
    mixed = Credentials(theirs.identity, mine.authority, theirs.certificate, theirs.key)
    async with worker(security()) as host:
        with pytest.raises(HandshakeError, match="it does not trust the authority of this process's certificate"):
            await snapshot(host.address, security=Security(credentials=mixed))
        assert host.handled == 0
    assert "its certificate is not one of this cluster's" in caplog.text


@pytest.mark.parametrize(
    ("demands", "told", "line"),
    [
        (True, "this port accepts only TLS; give the calling process certificates", "it does not begin with TLS, which this port requires"),
        (
            False,
            "do not trust each other: it does not use TLS; give certificates or the join token",
            "it begins with TLS, but this process has no certificates",
        ),
    ],
    ids=["plaintext where TLS is wanted", "TLS where there is none"],
)
@on_shared_loop
async def test_two_that_speak_differently(demands: bool, told: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caller, callee = (Security(), security()) if demands else (security(), Security())
    async with worker(callee) as host:
        with pytest.raises(HandshakeError, match=told):
            await snapshot(host.address, security=caller)
        assert host.handled == 0
    assert line in caplog.text


@on_shared_loop
async def test_who_has_a_certificate_gets_answers() -> None:
    """Whatever its role: operators exist for that."""
    async with worker(security()) as host:
        for role in Role:
            assert (await snapshot(host.address, security=security("x", role))).role == "worker"
        host.endpoint.set_serving(True)
        assert await health(host.address, security=security("x", Role.OPERATOR)) is Health.SERVING


@on_shared_loop
async def test_garbage_costs_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async with worker(security()) as host:
        async with asyncio.TaskGroup() as callers:
            for _ in range(100):
                callers.create_task(talk(host.address, b"GET / HTTP/1.1\r\n\r\n"))
            for _ in range(100):
                callers.create_task(talk(host.address, b"\x16\x03\x01\x00\x05hello"))
        assert host.handled == 0
        assert (await snapshot(host.address, security=security())).role == "worker"
    assert 1 <= len(caplog.records) <= 3


async def talk(address: str, said: bytes) -> None:
    """Send it, and read to the end."""
    connection = await dial(Address.parse(address), Security())
    try:
        async with asyncio.timeout(10.0):
            await connection.send_all(said)
            connection.finish()
            while await connection.receive(4096):
                pass
    finally:
        connection.close()


@on_shared_loop
async def test_grpcios_own_place_lets_nobody_in_but_through_the_door() -> None:
    """A local user can find the socket behind the front door (/proc/net/unix), but cannot call it from a visitor's address."""
    async with worker(security()) as host:
        door = host.endpoint._door
        assert door is not None
        place = door._admission._place
        assert isinstance(place, str)
        async with grpc.aio.insecure_channel(f"unix-abstract:{place[1:]}") as channel:
            for method in ("/shardnet.v1.Stats/Snapshot", "/grpc.health.v1.Health/Check", "/shardnet.v1.Mesh/Push"):
                with pytest.raises(grpc.aio.AioRpcError, match="call the port that this process listens on") as caught:
                    await call(channel, method)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert host.handled == 0


@on_shared_loop
async def test_visitors_are_forgotten() -> None:
    async with worker(security()) as host:
        for _ in range(3):
            await snapshot(host.address, security=security())
        door = host.endpoint._door
        assert door is not None
        while connections := door._tasks._tasks.difference(door._listeners):
            await asyncio.wait(connections)
        assert not door._admission._visitors


def started(program: str, argument: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", program, argument], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
@on_shared_loop
async def test_nobody_else_gets_what_is_meant_for_grpcio() -> None:
    """A process that takes the socket's name after grpcio has released it would hear what callers say, decrypted."""
    admission = Admission()
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen(); print(flush=True); s.accept()"
    )
    name = f"thief-{uuid.uuid4()}"
    with started(program, name) as thief:
        assert thief.stdout is not None
        await asyncio.to_thread(thief.stdout.readline)
        admission._place = f"\0{name}"
        with pytest.raises(ConnectionRefusedError, match="another process listens at grpcio's address"):
            await admission.visit(None).__aenter__()


async def call(channel: grpc.aio.Channel, method: str) -> None:
    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    await ask(b"")


@on_shared_loop
async def test_nobody_answers_is_no_matter_of_trust() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EndpointUnavailable):
        await snapshot(address, security=security())
