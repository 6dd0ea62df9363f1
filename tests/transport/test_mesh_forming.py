"""Forming a mesh, and what is left of one that did not form or was closed."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from shardnet.backend.cluster import ClusterBackend
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import ClosedError, InvalidRankError, InvalidWorldSizeError, PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import stats_pb2
from shardnet.testing import Relay, each_rank, local_cluster
from shardnet.topology import Member, Topology
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService
from tests.resources import Resources

TIMEOUTS = replace(Timeouts.for_tests(), connect_s=0.6)
NOBODY = "127.0.0.1:1"  # a port on which nothing listens


@contextlib.asynccontextmanager
async def places(count: int, world_size: int) -> AsyncIterator[tuple[list[MeshService], tuple[Member, ...]]]:
    """Ports of the first `count` ranks of a world; the others' addresses answer nobody."""
    loop = LoopThread.shared()
    async with contextlib.AsyncExitStack() as stack:
        services, addresses = [], []
        for _ in range(count):
            services.append(MeshService(TIMEOUTS))
            endpoint = Endpoint("127.0.0.1:0", limits=Limits(), timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply)
            endpoint.add_mesh(services[-1])
            await loop.run_here(endpoint.start())
            stack.push_async_callback(_close, endpoint)
            addresses.append(endpoint.address)
        addresses += [NOBODY] * (world_size - count)
        yield services, tuple(Member(rank, rank, 0, address, "node", f"w{rank}") for rank, address in enumerate(addresses))


async def _close(endpoint: Endpoint) -> None:
    await LoopThread.shared().run_here(endpoint.aclose(0))


def start(
    rank: int, members: tuple[Member, ...], service: MeshService, *, job: str = "job", epoch: int = 1, timeouts: Timeouts = TIMEOUTS
) -> "asyncio.Task[ClusterBackend]":
    topology = Topology(epoch, rank, members)
    mesh = GrpcMesh(job, topology, service, Security(), timeouts, Limits())
    return asyncio.ensure_future(ClusterBackend.start(mesh, topology, timeouts=TIMEOUTS, limits=Limits()))


async def test_who_is_missing_is_named() -> None:
    texts = []
    async with places(2, 4) as (services, members):
        for starting in [start(rank, members, services[rank]) for rank in range(2)]:
            with pytest.raises(PeerLost) as caught:
                await starting
            text = str(caught.value)
            assert "the mesh could not be formed: " in text
            # one of the two gives up first, and the other may see that before its own time is over
            for rank in (2, 3):
                assert re.search(rf"rank {rank} \({NOBODY}\): (no connection within 0.6 s|not connected yet): Connection refused", text)
            texts.append(text)
    said = "; ".join(f"rank {rank} ({NOBODY}): no connection within 0.6 s: Connection refused" for rank in (2, 3))
    assert any(f"{said}; all workers must be able to connect to the port of each worker; run `shardnet doctor`" in text for text in texts)


async def test_who_is_missing_is_said_before_the_time_is_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("shardnet.transport.grpc_mesh.PATIENCE_S", 0.2)
    async with places(1, 2) as (services, members):
        with pytest.raises(PeerLost):
            await start(0, members, services[0])
    assert caplog.messages == [f"[rank 0/2 epoch 1] no connection yet with rank 1 ({NOBODY}): Connection refused"]


async def test_an_address_of_another_machine_alone_is_named_as_such() -> None:
    async with places(1, 2) as (services, members):
        elsewhere = members[0], replace(members[1], node="another")
        with pytest.raises(
            PeerLost, match=r"Connection refused, and this loopback address can be reached only on that machine \(start the worker"
        ):
            await start(0, elsewhere, services[0])


async def test_who_can_be_called_but_does_not_call_is_told_apart() -> None:
    """For example because this rank's port is closed to others, or its address is valid only on this machine."""
    async with places(2, 2) as (services, (own, other)):
        here = replace(own, address=own.address, node="here"), other
        there = replace(own, address=NOBODY, node="here"), other
        closed = start(1, there, services[1], timeouts=replace(TIMEOUTS, connect_s=10.0))
        calling = start(0, here, services[0])
        with pytest.raises(
            PeerLost,
            match=rf"rank 1 .*: this rank can call it, but it does not reach this rank at {own.address}, and this loopback address can be "
            r"reached only on this machine \(start this worker with --listen HOST\)",
        ):
            await calling
        with pytest.raises(PeerLost):
            await closed


async def test_a_rank_that_comes_late_is_waited_for() -> None:
    async with places(2, 2) as (services, members):
        first = start(0, members, services[0])
        await asyncio.wait({first}, timeout=0.2)
        assert not first.done()
        ranks = [await start(1, members, services[1]), await first]
        await each_rank(ranks, lambda rank: rank.barrier())
        await asyncio.gather(*(rank.aclose() for rank in ranks))


async def test_a_rank_that_is_cut_off_before_it_was_let_in_calls_again() -> None:
    """A port with many callers may do that: [Note: strangers]."""
    patient = replace(TIMEOUTS, connect_s=20.0)
    async with places(2, 2) as (services, (own, other)), Relay(other.address) as relay:
        relay.hold()
        first = start(0, (own, replace(other, address=relay.address)), services[0], timeouts=patient)
        second = start(1, (own, other), services[1], timeouts=patient)
        async with asyncio.timeout(10.0):
            while not relay.connections:  # noqa: ASYNC110 - the relay does not say when one comes
                await asyncio.sleep(0.01)
        relay.cut()
        relay.mend()
        ranks = [await first, await second]
        await each_rank(ranks, lambda rank: rank.barrier())
        await asyncio.gather(*(rank.aclose() for rank in ranks))


async def test_a_refusal_ends_the_wait_at_once() -> None:
    """Two ranks belong to different jobs. The one that is refused says so and leaves; the other may call after that, and find nobody."""
    async with places(2, 2) as (services, members):
        loop = asyncio.get_running_loop()
        begin = loop.time()
        ranks = {start(0, members, services[0], job="one"), start(1, members, services[1], job="two")}
        await asyncio.wait(ranks, return_when=asyncio.FIRST_COMPLETED)
        assert loop.time() - begin < TIMEOUTS.connect_s
        failures = [str(failure) for failure in await asyncio.gather(*ranks, return_exceptions=True) if isinstance(failure, PeerLost)]
        assert len(failures) == 2
        assert any("this worker belongs to job" in failure for failure in failures)


async def test_cancelling_leaves_nothing() -> None:
    async with places(1, 2) as (services, members):
        starting = start(0, members, services[0])
        await asyncio.wait({starting}, timeout=0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_an_abort_leaves_nothing() -> None:
    """It leaves no task and no descriptor, while the other ranks and all ports go on."""
    async with local_cluster(3) as ranks:
        await each_rank(ranks, lambda rank: rank.barrier())
        before = Resources()
        large = ranks[0].all_reduce(torch.ones(1_000_000))
        ranks[0].abort()
        await ranks[0].aclose()
        assert isinstance(await asyncio.to_thread(large.exception), Exception)
        assert [leak for leak in Resources().beyond(before) if "task" in leak and "rank 0" in leak] == []


async def test_worlds_one_after_the_other() -> None:
    """Each gives back what it opened; ports and threads do not add up (the guard of every test looks)."""
    for _ in range(5):
        async with local_cluster(3) as ranks:
            await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(3)))


async def test_an_error_in_the_middle_ends_a_local_cluster_at_once() -> None:
    """The test gets the error that it raised, and does not wait for collectives that cannot end."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    handles = []

    async def fail() -> None:
        async with local_cluster(2, timeouts=Timeouts()) as ranks:
            handles.append(ranks[0].barrier())
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert loop.time() - begin < 5.0
    assert isinstance(handles[0].exception(), ClosedError)


def test_places_that_cannot_be() -> None:
    member = Member(0, 0, 0, NOBODY, "node", "w0")
    with pytest.raises(InvalidWorldSizeError):
        Topology(1, 0, ())
    for rank in (-1, 1, 5):
        with pytest.raises(InvalidRankError, match=re.escape(f"rank {rank} is not in [0, 1)")) as caught:
            Topology(1, rank, (member,))
        assert (caught.value.rank, caught.value.world_size) == (rank, 1)
