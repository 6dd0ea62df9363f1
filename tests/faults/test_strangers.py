"""Callers without a valid certificate, or with another worker's: no handler runs, and one log line per connection says who and why."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import pytest

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Credentials, Security
from shardnet.transport.dialing import dial
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.hello import Hello
from shardnet.transport.http2 import Call, Status, frames
from shardnet.transport.http2.headers import HeaderCodec, request
from shardnet.transport.outbox import PUSH
from tests.credentials.made import credentials, security
from tests.faults.ledger import scenario
from tests.faults.log_lines import heard_lines
from tests.faults.ports import dissolve, mesh_of, ports
from tests.shared_loop import on_shared_loop
from tests.transport.test_strangers import expired, nameless, worker

SEED = 20_261_130
TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
times = pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.faults)])


def signed_elsewhere() -> Credentials:
    """Credentials that trust this cluster, but show a certificate of another authority."""
    mine, theirs = credentials(), credentials(by="another")
    return Credentials(theirs.identity, mine.authority, theirs.certificate, theirs.key)


STRANGERS: dict[str, tuple[Callable[[], Security], str]] = {
    "no certificate": (lambda: Security(credentials=nameless()), "it sent no certificate"),
    "wrong authority": (lambda: Security(credentials=signed_elsewhere()), "its certificate is not one of this cluster's"),
    "expired": (lambda: Security(credentials=expired()), "its certificate has expired by this machine's clock; compare the clocks"),
    "plaintext": (Security, "it does not begin with TLS, which this port requires"),
}


@times
@pytest.mark.parametrize("stranger", STRANGERS)
@on_shared_loop
async def test_who_is_turned_away_at_the_door(stranger: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardnet.transport.throttle.EVERY_S", 0.0)  # so that each refusal gets its own line
    make, why = STRANGERS[stranger]
    with scenario(f"strangers: {stranger}", SEED, kept=times > 5) as figures:
        async with worker(security()) as host:
            with heard_lines() as lines:
                for _ in range(times):
                    await ask_for_statistics(host.address, make())
                    figures.repeats += 1
            figures.measured = {"handlers_entered": host.handled, "lines": len(lines)}
            assert host.handled == 0
            assert len(lines) == times
            assert all(line.text.startswith("refused a connection from 127.0.0.1:") and why in line.text for line in lines), lines
            await ask_for_statistics(host.address, security())  # a valid caller does enter a handler
            assert host.handled == 1


async def ask_for_statistics(address: str, protection: Security) -> None:
    """Open one connection, without a second one to find out why it failed; read to its end, or to the answer."""
    with suppress(OSError):
        connection = await dial(Address.parse(address), protection)
        try:
            block = frames.frame(frames.Type.HEADERS, frames.Flags.END_HEADERS, 1, STATISTICS)
            message = frames.frame(frames.Type.DATA, frames.Flags.END_STREAM, 1, bytes(5))
            await connection.send_all(frames.PREFACE + frames.settings({}) + block + message)
            heard = b""
            while b"worker" not in heard and (more := await connection.receive(65536)):
                heard += more
        finally:
            connection.close()


STATISTICS = HeaderCodec().encode(request("member.shardnet", "/shardnet.v1.Stats/Snapshot", ()))


@times
@on_shared_loop
async def test_another_workers_place(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has a certificate of the cluster and knows everything about rank 1 except its key. The ranks work on."""
    monkeypatch.setattr("shardnet.transport.throttle.EVERY_S", 0.0)
    with scenario("strangers: another worker's identity", SEED, kept=times > 5) as figures, heard_lines() as lines:
        async with ports(2, security=security("node-0"), timeouts=TIMEOUTS, limits=LIMITS) as pool:
            ranks = await pool.form()
            mesh_of(ranks[0])._inbound.pop(1, None)  # its place looks free
            entered, connected = 0, GrpcMesh.connected

            def enter(mesh: GrpcMesh, peer: int) -> AbstractContextManager[None]:
                nonlocal entered
                entered += 1
                return connected(mesh, peer)

            monkeypatch.setattr(GrpcMesh, "connected", enter)
            address, hello = Address.parse(mesh_of(ranks[0]).address(0)), mesh_of(ranks[1])._outboxes[0]._hello
            for _ in range(times):
                status = await open_stream(address, hello)
                assert (
                    status.details
                    == "the caller is worker 'node-9' of any job, but rank 1 is " + mesh_of(ranks[0])._topology.members[1].identity
                )
                figures.repeats += 1
            await dissolve(ranks)
        figures.measured = {"handlers_entered": entered, "lines": len(lines)}
        assert entered == 0
        assert len(lines) == times
        assert all("refused a stream from" in line.text and "but rank 1 is" in line.text for line in lines)


async def open_stream(address: Address, hello: Hello) -> Status:
    call = Call(await dial(address, security("node-9")), LIMITS)
    try:
        call.open(str(address), PUSH, hello.metadata())
        return Status.read(await call.headers())
    finally:
        call.close()
