"""What a rendezvous lets the holder of a certificate do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.credentials.token import from_token, new_token
from shardnet.errors import HandshakeError, JoinRefused
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.rendezvous import messages
from shardnet.rendezvous.client import Membership, join, status
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.server import RendezvousServer
from shardnet.transport.options import channel_options
from tests.credentials.made import security
from tests.rendezvous.builders import worker
from tests.shared_loop import on_shared_loop

TIMEOUTS = replace(Timeouts.for_tests(), connect_s=5.0)


@asynccontextmanager
async def rendezvous(protection: Security | None = None) -> AsyncIterator[str]:
    protection = protection or security("rendezvous", Role.RENDEZVOUS)
    async with RendezvousServer("127.0.0.1:0", timeouts=TIMEOUTS, security=protection) as server:
        yield server.address


def joining(address: str, request: JoinRequest, protection: Security) -> Membership:
    return join(address, request, timeouts=TIMEOUTS, security=protection)


async def refusal(address: str, request: JoinRequest, protection: Security) -> tuple[str, str]:
    with pytest.raises(JoinRefused) as caught:
        await joining(address, request, protection).__aenter__()
    return caught.value.reason, str(caught.value)


@on_shared_loop
async def test_members_learn_who_the_others_have_proved_to_be() -> None:
    protections = [security("node-0", job="job"), security("node-1", job="job")]
    async with rendezvous() as address:
        requests = [worker(number, node=f"node-{number}") for number in range(2)]
        memberships = [joining(address, *both) for both in zip(requests, protections, strict=True)]
        await asyncio.gather(*(membership.__aenter__() for membership in memberships))
        for membership in memberships:  # in order of arrival
            found = sorted(member.identity for member in membership.topology.members)
            assert found == ["shardnet:worker:job:node-0", "shardnet:worker:job:node-1"]
        await asyncio.gather(*(membership.aclose() for membership in memberships))


@on_shared_loop
async def test_a_certificate_is_for_its_job_only() -> None:
    async with rendezvous() as address:
        reason, text = await refusal(address, worker(0, job="other"), security("node-0", job="job"))
    assert reason == Refusal.IDENTITY
    assert text.startswith("a certificate for worker 'node-0' of job 'job' does not let its holder join job 'other'; issue one that does")


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.RENDEZVOUS])
@on_shared_loop
async def test_only_workers_join(role: Role) -> None:
    async with rendezvous() as address:
        assert (await refusal(address, worker(0), security("x", role)))[0] == Refusal.IDENTITY


@on_shared_loop
async def test_one_worker_is_there_once() -> None:
    """A machine's certificate and a local rank identify a worker; another machine, or the next local rank, is another worker."""
    protection, there = security("node-0"), asyncio.Event()
    async with rendezvous() as address:
        request = worker(0, most=3, least=3)
        first = join(address, request, timeouts=TIMEOUTS, security=protection, on_waiting=lambda _: there.set())
        entering = asyncio.ensure_future(first.__aenter__())
        await there.wait()
        reason, text = await refusal(address, worker(1, most=3, least=3), protection)
        assert reason == Refusal.DUPLICATE_WORKER
        assert "give each machine a certificate of its own (shardnet certs issue)" in text
        others = [
            joining(address, worker(2, most=3, least=3, hint=1), protection),
            joining(address, worker(3, most=3, least=3, node="b"), security("node-1")),
        ]
        await asyncio.gather(entering, *(other.__aenter__() for other in others))
        assert first.topology.world_size == 3
        await asyncio.gather(*(membership.aclose() for membership in (first, *others)))


@on_shared_loop
async def test_a_machine_is_that_of_one_certificate() -> None:
    """Workers of one node open memory that another one names on their machine, so nobody else may claim to be there."""
    there = asyncio.Event()
    async with rendezvous() as address:
        first = join(address, worker(0), timeouts=TIMEOUTS, security=security("node-0"), on_waiting=lambda _: there.set())
        entering = asyncio.ensure_future(first.__aenter__())
        await there.wait()
        reason, text = await refusal(address, worker(1), security("node-9"))
        assert reason == Refusal.IDENTITY
        assert text.startswith("node 'a' belongs to shardnet:worker:*:node-0, but this worker has the certificate of another machine")
        async with joining(address, worker(2, hint=1), security("node-0")):
            await entering
            await first.aclose()


@on_shared_loop
async def test_with_a_token_workers_of_a_machine_have_nothing_in_common() -> None:
    token = new_token()
    protections = [Security(credentials=from_token(token, Role.WORKER)) for _ in range(2)]
    async with rendezvous(Security(credentials=from_token(token, Role.RENDEZVOUS))) as address:
        memberships = [joining(address, worker(number), protection) for number, protection in enumerate(protections)]
        await asyncio.gather(*(membership.__aenter__() for membership in memberships))
        assert {len(membership.topology.neighbours) for membership in memberships} == {1}
        await asyncio.gather(*(membership.aclose() for membership in memberships))


@on_shared_loop
async def test_a_worker_is_not_asked_who_is_there() -> None:
    async with rendezvous(security("node-0")) as address:
        with pytest.raises(HandshakeError, match="not for a rendezvous"):
            await status(address, security=security("me", Role.OPERATOR))


@on_shared_loop
async def test_nobody_fails_for_another() -> None:
    async with rendezvous() as address, joining(address, worker(0, least=1, most=1), security("node-0")) as membership:
        thief = security("node-1").channel(address, channel_options(TIMEOUTS, Limits()), to=Role.RENDEZVOUS)
        fail: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = thief.unary_unary(f"/{messages.SERVICE}/Fail")
        with pytest.raises(grpc.aio.AioRpcError, match="worker 'node-1' of any job is not the worker that joined"):
            await fail(pb.FailRequest(job="job", incarnation=membership.topology.me.incarnation, why="a lie").SerializeToString())
        await thief.close()


@on_shared_loop
async def test_nobody_says_goodbye_for_another() -> None:
    async with rendezvous() as address, joining(address, worker(0, least=1, most=1), security("node-0")) as membership:
        thief = security("node-1").channel(address, channel_options(TIMEOUTS, Limits()), to=Role.RENDEZVOUS)
        leave = thief.unary_unary(
            f"/{messages.SERVICE}/Leave",
            request_serializer=pb.LeaveRequest.SerializeToString,
            response_deserializer=pb.LeaveReply.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError, match="worker 'node-1' of any job is not the worker that joined") as caught:
            await leave(pb.LeaveRequest(job="job", incarnation=membership.topology.me.incarnation))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await leave(pb.LeaveRequest(job="job", incarnation="of nobody"))
        await thief.close()


@on_shared_loop
async def test_a_worker_is_no_rendezvous() -> None:
    """Otherwise anybody with a worker's certificate could assign ranks."""
    async with rendezvous(security("node-0")) as address:
        with pytest.raises(HandshakeError, match="its certificate is for worker 'node-0' of any job, not for a rendezvous"):
            await joining(address, worker(0), security("node-1")).__aenter__()


@on_shared_loop
async def test_who_is_not_trusted_learns_it_at_once() -> None:
    """It does not have to wait until `connect_s` is over."""
    async with rendezvous() as address, asyncio.timeout(TIMEOUTS.connect_s - 1):
        with pytest.raises(HandshakeError, match="not one of this cluster's"):
            await joining(address, worker(0), security(by="another")).__aenter__()
        with pytest.raises(HandshakeError, match="this port accepts only TLS"):
            await joining(address, worker(0), Security()).__aenter__()
