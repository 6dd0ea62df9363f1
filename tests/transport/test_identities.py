"""Streams between workers that have certificates: each end is the worker that the rendezvous placed there, or there is no stream."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import torch
from crc32c import crc32c

from shardnet.address import Address
from shardnet.backend.cluster import ClusterBackend
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import PeerLost
from shardnet.pb import stats_pb2
from shardnet.testing import each_rank, local_cluster
from shardnet.topology import Member, Topology
from shardnet.transport.dialing import dial
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.hello import Hello
from shardnet.transport.http2 import Call, Status
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.outbox import PUSH
from tests.credentials.made import security
from tests.shared_loop import on_shared_loop

TIMEOUTS, LIMITS = replace(Timeouts.for_tests(), connect_s=5.0), Limits()


@pytest.mark.parametrize("ranks_per_node", [1, 3])
async def test_collectives_under_tls(ranks_per_node: int) -> None:
    """With data of all sizes, from copied to lent; the rest of the contract is the same with TLS."""
    async with local_cluster(3, ranks_per_node=ranks_per_node, security=security()) as ranks:
        for numel in (1, 1000, 300_000, 3_000_000):
            data = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
            sums = await each_rank(ranks, lambda rank, data=data: rank.all_reduce(data[rank.rank].clone()))  # type: ignore[misc]
            for each in sums:
                torch.testing.assert_close(each, data[0] + data[1] + data[2])
            for each in await each_rank(ranks, lambda rank, data=data: rank.all_gather(data[rank.rank])):  # type: ignore[misc]
                assert torch.equal(each, torch.cat(data))


@pytest.mark.parametrize("protection", [None, security()], ids=["plaintext", "TLS"])
async def test_checksums_are_for_plaintext(protection: Security | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a ring, where ranks pass chunks on as they came."""
    summed = list[int]()

    def counted(data: bytes, value: int = 0) -> int:
        summed.append(len(data))
        return crc32c(data, value)

    monkeypatch.setattr("shardnet.wire.crc32c", counted)
    async with local_cluster(3, ranks_per_node=1, security=protection) as ranks:
        total = await each_rank(ranks, lambda rank: rank.all_reduce(torch.full((2_000_000,), float(rank.rank))))
    assert all(torch.equal(each, torch.full((2_000_000,), 3.0)) for each in total)
    assert (sum(summed) > 8_000_000) is (protection is None)
    assert bool(summed) is (protection is None)


@asynccontextmanager
async def two(
    protections: tuple[Security, Security], placed: tuple[str, str]
) -> AsyncIterator[tuple[tuple[Member, ...], list[MeshService]]]:
    """Two workers' ports, each with its own protection, and the identities that the rendezvous gives them."""
    services, members = [], []
    async with AsyncExitStack() as stack:
        for rank, (protection, identity) in enumerate(zip(protections, placed, strict=True)):
            services.append(MeshService(TIMEOUTS))
            endpoint = Endpoint("127.0.0.1:0", limits=LIMITS, timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply, security=protection)
            endpoint.add_mesh(services[-1])
            await endpoint.start()
            stack.push_async_callback(endpoint.aclose, 0)
            members.append(Member(rank, 0, rank, endpoint.address, f"node{rank}", f"w{rank}", identity))
        yield tuple(members), services


def start(rank: int, members: tuple[Member, ...], service: MeshService, protection: Security) -> "asyncio.Task[ClusterBackend]":
    topology = Topology(1, rank, members)
    mesh = GrpcMesh("job", topology, service, protection, TIMEOUTS, LIMITS)
    return asyncio.ensure_future(ClusterBackend.start(mesh, topology, timeouts=TIMEOUTS, limits=LIMITS))


def uri(protection: Security) -> str:
    assert protection.credentials is not None
    return protection.credentials.identity.uri


@on_shared_loop
async def test_who_was_placed_is_let_in() -> None:
    protections = security("node-0"), security("node-1")
    async with two(protections, (uri(protections[0]), uri(protections[1]))) as (members, services):
        ranks = await asyncio.gather(*(start(rank, members, services[rank], protections[rank]) for rank in range(2)))
        assert await asyncio.gather(*(rank.all_reduce(torch.ones(1)) for rank in ranks)) == [torch.tensor([2.0])] * 2
        await asyncio.gather(*(rank.aclose() for rank in ranks))


@on_shared_loop
async def test_who_was_not_placed_is_not_called() -> None:
    """Somebody with a certificate of the cluster has taken the address of rank 1: rank 0 shows it nothing."""
    mine, theirs, placed = security("node-0"), security("node-9"), security("node-1")
    async with two((mine, theirs), (uri(mine), uri(placed))) as (members, services):
        text = f"the process at {members[1].address} is worker 'node-9' of any job, but the member at this address must be {uri(placed)}"
        with pytest.raises(PeerLost, match=re.escape(text)):
            await start(0, members, services[0], mine)


@on_shared_loop
async def test_another_workers_identity_opens_no_stream() -> None:
    """A caller that knows everything about rank 1, its incarnation included, still needs its certificate."""
    mine, placed, thief = security("node-0"), security("node-1"), security("node-9")
    async with two((mine, placed), (uri(mine), uri(placed))) as (members, services):
        ranks = await asyncio.gather(*(start(rank, members, services[rank], (mine, placed)[rank]) for rank in range(2)))
        mesh = services[0].mesh
        assert mesh is not None
        call = Call(await dial(Address.parse(members[0].address), thief), LIMITS)
        call.open(members[0].address, PUSH, Hello("job", 1, 1, 0, "w1", mesh._terms).metadata())
        status = Status.read(await call.headers())
        call.close()
        assert status.code is grpc.StatusCode.FAILED_PRECONDITION
        assert status.details == f"the caller is worker 'node-9' of any job, but rank 1 is {uri(placed)}"
        assert await asyncio.gather(*(rank.all_reduce(torch.ones(1)) for rank in ranks)) == [torch.tensor([2.0])] * 2
        await asyncio.gather(*(rank.aclose() for rank in ranks))
