"""`shardnet.v1.Store`: keys that the workers of one world share, kept by its rank 0."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import ClosedError, EndpointUnavailable, HandshakeError, ProtocolError, UsageError
from shardnet.pb import stats_pb2
from shardnet.pb.store_pb2 import StoreReply, StoreRequest
from shardnet.topology import Member
from shardnet.transport import store_service
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.store_service import StoreClient, StoreService
from tests.credentials.made import security
from tests.shared_loop import on_shared_loop

TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
EPOCH = 3
Keys, Entries, Exchange, Sum = StoreRequest.Keys, StoreRequest.Entries, StoreRequest.Exchange, StoreRequest.Sum


@asynccontextmanager
async def opened(
    *callers: Security, protection: Security | None = None, epoch: int | None = EPOCH, placed: str = ""
) -> AsyncIterator[tuple[StoreService, list[StoreClient]]]:
    """A worker that keeps a store, and others that ask it."""
    service = StoreService("lm")
    endpoint = Endpoint("127.0.0.1:0", limits=LIMITS, timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply, security=protection)
    endpoint.add(service.handlers)
    async with endpoint:
        if epoch is not None:
            service.open(epoch)
        identity = "" if protection is None or protection.credentials is None else protection.credentials.identity.uri
        keeper = Member(0, 0, 0, endpoint.address, "a", "w0", placed or identity)
        clients = [StoreClient(keeper, each, TIMEOUTS, LIMITS) for each in callers or (Security(),)]
        try:
            yield service, clients
        finally:
            service.close()
            for client in clients:
                await client.aclose()


def asked(within_s: float = 0.0, epoch: int = EPOCH, **what: Any) -> StoreRequest:
    return StoreRequest(epoch=epoch, within_s=within_s, **what)


@pytest.mark.parametrize("here", [True, False], ids=["rank 0", "another rank"])
@on_shared_loop
async def test_what_is_asked(here: bool) -> None:
    async with opened() as (service, (client,)):

        async def ask(**what: Any) -> StoreReply:
            return await (service if here else client).ask(asked(**what))

        await ask(set=Entries(keys=["a", "b"], values=[b"1", b"\x00\xff"]))
        assert list((await ask(get=Keys(keys=["b", "a"]))).values) == [b"\x00\xff", b"1"]
        await ask(append=Entries(keys=["b", "c"], values=[b"!", b"new"]))
        assert list((await ask(get=Keys(keys=["b", "c"]))).values) == [b"\x00\xff!", b"new"]
        assert [(await ask(add=Sum(key=key, amount=by))).number for key, by in (("a", 4), ("n", -2), ("n", 0))] == [5, -2, -2]
        exchanges = [("a", b"no", b"x", b"5"), ("a", b"5", b"x", b"x"), ("d", b"no", b"x", b"no"), ("d", b"", b"y", b"y")]
        for key, expected, desired, found in exchanges:
            reply = await ask(exchange=Exchange(key=key, expected=expected, desired=desired))
            assert list(reply.values) == [found], (key, expected)
        assert [(await ask(check=Keys(keys=keys))).number for keys in (["a", "d"], ["a", "e"], [])] == [1, 0, 1]
        assert (await ask(count=True)).number == 5
        assert (await ask(delete=Keys(keys=["a", "a", "e"]))).number == 1
        assert (await ask(count=True)).number == 4
        with pytest.raises(UsageError, match="the value of 'c' is not a number: b'new'"):
            await ask(add=Sum(key="c", amount=1))


@on_shared_loop
async def test_who_waits_for_keys_hears_when_the_last_of_them_is_there() -> None:
    async with opened() as (service, (client,)):
        waiting = [asyncio.ensure_future(each.ask(asked(20.0, get=Keys(keys=["a", "b"])))) for each in (service, client)]
        await client.ask(asked(set=Entries(keys=["a"], values=[b"1"])))
        assert not any(each.done() for each in waiting)
        await client.ask(asked(set=Entries(keys=["b"], values=[b"2"])))
        assert [list(reply.values) for reply in await asyncio.gather(*waiting)] == [[b"1", b"2"]] * 2


@on_shared_loop
async def test_who_waits_in_vain_hears_for_what() -> None:
    async with opened() as (_, (client,)):
        await client.ask(asked(set=Entries(keys=["a"], values=[b"1"])))
        keys = Keys(keys=["a", "b", "c"])
        for request in (asked(0.05, get=keys), asked(0.05, wait=keys)):
            reply = await client.ask(request)
            assert (list(reply.missing), list(reply.values)) == (["b", "c"], [])


@on_shared_loop
async def test_who_waits_hears_that_the_store_closes() -> None:
    async with opened() as (service, (client,)):
        here, there = (asyncio.ensure_future(each.ask(asked(20.0, wait=Keys(keys=["a"])))) for each in (service, client))
        await client.ask(asked(count=True))  # sent after the other request, which waits by now
        service.close()
        with pytest.raises(ClosedError, match="the worker that keeps the store of this world is closing"):
            await here
        with pytest.raises(EndpointUnavailable, match="the worker that keeps the store of this world is closing"):
            await there


@on_shared_loop
async def test_who_is_early_waits_for_rank_0_to_have_its_place() -> None:
    async with opened(epoch=None) as (service, (client,)):
        early = asyncio.ensure_future(client.ask(asked(count=True)))
        await asyncio.wait({early}, timeout=0.05)
        assert not early.done()
        service.open(EPOCH)
        assert (await early).number == 0


@on_shared_loop
async def test_another_rank_keeps_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_service, "HANDSHAKE_S", 0.05)
    async with opened(epoch=None) as (_, (client,)):
        with pytest.raises(UsageError, match="it is not rank 0, or does not know its rank yet"):
            await client.ask(asked(count=True))


@on_shared_loop
async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_service, "MAX_BYTES", 1000)
    async with opened() as (service, (client,)):
        with pytest.raises(UsageError, match=r"within_s must be 0 to 1e\+07 seconds, got nan"):
            await service.ask(asked(float("nan"), count=True))
        for request, why in (
            (asked(count=True, epoch=2), "this is the store of epoch 3, the caller is of epoch 2"),
            (asked(set=Entries(keys=["a"])), "got 1 keys and 0 values"),
            (asked(), "names no operation"),
            (asked(-1.0, count=True), r"within_s must be 0 to 1e\+07 seconds, got -1"),
            (asked(set=Entries(keys=["a"], values=[bytes(900)])), "full: it keeps at most 1000 bytes"),
        ):
            with pytest.raises(UsageError, match=why):
                await client.ask(request)
        for _ in range(20):  # a key that is written again, or deleted, is not counted twice
            await client.ask(asked(set=Entries(keys=["a"], values=[bytes(600)])))
            await client.ask(asked(set=Entries(keys=["a"], values=[bytes(700)])))
            await client.ask(asked(delete=Keys(keys=["a"])))


@on_shared_loop
async def test_workers_of_the_job_alone_are_answered() -> None:
    """Any other caller with a certificate of the cluster is told what is missing."""
    worker, other, operator = security(job="lm"), security(job="another"), security(role=Role.OPERATOR)
    async with opened(worker, other, operator, protection=worker) as (_, clients):
        assert (await clients[0].ask(asked(count=True))).number == 0
        for client in clients[1:]:
            with pytest.raises(ProtocolError, match=r"PERMISSION_DENIED: .* is not a worker of job 'lm'"):
                await client.ask(asked(count=True))


@on_shared_loop
async def test_another_worker_at_the_keepers_address_is_told_nothing() -> None:
    """grpcio takes any worker's certificate: of another job, for instance, whose worker has got this address by now."""
    async with opened(security(job="lm"), protection=security("mallory", job="lm"), placed="shardnet:worker:lm:node-0") as (
        store,
        (client,),
    ):
        with pytest.raises(HandshakeError, match="'mallory' of job 'lm', but the member at this address must be shardnet:worker:lm:node-0"):
            await client.ask(asked(set=Entries(keys=["a"], values=[b"secret"])))
        assert (await store.ask(asked(count=True))).number == 0


@on_shared_loop
async def test_who_does_not_speak_it() -> None:
    async with opened() as (_, (client,)):
        call: Any = client._channel.unary_unary(store_service.PATH)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\xff\xff\xff")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
