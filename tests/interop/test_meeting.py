"""How ranks find each other in torch's store."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store

from shardnet.errors import HandshakeError, JoinTimeout, PeerLost, ProtocolError, StateError
from shardnet.interop.meeting import meet
from shardnet.interop.registration import register
from shardnet.interop.world import World
from shardnet.topology import Topology


async def come(store: Store, rank: int, world_size: int, node: str = "here", timeout_s: float = 10.0) -> Topology:
    return await meet(store, rank, world_size, node, f"start {rank}", timeout_s, f"10.0.0.{rank}:7000", f"identity {rank}")


async def test_all_see_the_same() -> None:
    store = HashStore()
    first, second = await asyncio.gather(*(come(store, rank, 2) for rank in range(2)))
    assert (first.rank, second.rank) == (0, 1)
    assert first.members == second.members
    me = first.me
    assert (me.address, me.node, me.incarnation, me.identity, me.local_rank) == ("10.0.0.0:7000", "here", "start 0", "identity 0", 0)


class Counting:
    """A store, and how often it was asked for what has been written."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        self.reads += name in ("get", "multi_get")
        return getattr(self._store, name)


async def test_a_store_is_read_once_by_each_rank() -> None:
    """It serves all of them: ranks that ask about each other one by one would be too many for it."""
    store, ranks = Counting(), 12
    await asyncio.gather(*(come(cast("Store", store), rank, ranks) for rank in range(ranks)))
    assert store.reads == ranks


async def test_stores_that_give_one_value_at_a_time_will_do(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 3)
    assert len({topology.members for topology in await asyncio.gather(*(come(store, rank, 3) for rank in range(3)))}) == 1


async def test_nodes_whose_ranks_take_turns() -> None:
    store = HashStore()
    topology, *_ = await asyncio.gather(*(come(store, rank, 4, "ab"[rank % 2]) for rank in range(4)))
    assert [(member.node_group, member.local_rank) for member in topology.members] == [(0, 0), (1, 0), (0, 1), (1, 1)]


async def test_the_next_world_does_not_see_what_the_last_one_left() -> None:
    store = HashStore()
    for epoch, address in ((1, "first"), (2, "second")):
        topologies = await asyncio.gather(*(meet(store, rank, 2, "here", "start", 10.0, f"{address}:{rank}", "") for rank in range(2)))
        assert [each.epoch for each in topologies] == [epoch] * 2
        assert [member.address for member in topologies[0].members] == [f"{address}:0", f"{address}:1"]


async def test_who_does_not_come_is_named() -> None:
    with pytest.raises(JoinTimeout, match=r"ranks 0, 2 of 3 have not joined within 0\.1 s"):
        await come(HashStore(), 1, 3, timeout_s=0.1)


async def test_who_comes_in_the_last_moment_is_there() -> None:
    """After it was looked for, and before the error would name it."""

    class Tardy(Counting):
        def check(self, keys: list[str]) -> bool:
            if there := self._store.check(keys):
                return there
            self._store.set(keys[-1], json.dumps({"address": "10.0.0.1:7000", "node": "here", "incarnation": "w1", "identity": "me"}))
            return False

    topology = await come(cast("Store", Tardy()), 0, 2, timeout_s=0.0)
    assert topology.members[1].incarnation == "w1"


async def test_who_has_given_up_is_not_looked_for() -> None:
    store = HashStore()
    with pytest.raises(JoinTimeout, match="ranks 1 of 2"):
        await come(store, 0, 2, timeout_s=0.1)
    with pytest.raises(JoinTimeout, match="ranks 0 of 2"):
        await come(store, 1, 2, timeout_s=0.1)


async def test_who_comes_again_meets_who_comes_late() -> None:
    store = HashStore()
    for _ in range(3):
        with pytest.raises(JoinTimeout, match="ranks 1 of 2"):
            await come(store, 0, 2, timeout_s=0.1)
    for epoch in (1, 2):
        first, second = await asyncio.gather(*(come(store, rank, 2) for rank in range(2)))
        assert (first.epoch, second.epoch) == (epoch, epoch)


def test_who_is_gone_is_looked_for_no_longer_than_the_time_to_begin() -> None:
    store = HashStore()
    store.set("shardnet/world 0/rank 0", json.dumps({"address": "127.0.0.1:1", "node": "here", "incarnation": "gone", "identity": ""}))
    with pytest.raises(PeerLost, match=r"rank 0 \(127\.0\.0\.1:1\): no connection within 0\.5 s"):
        World.meet(store, 1, 2, 0.5)


async def test_some_are_protected_and_others_are_not() -> None:
    store = HashStore()
    ranks = [meet(store, rank, 3, "here", "start", 10.0, f"10.0.0.{rank}:7000", "me" if rank else "") for rank in range(3)]
    for error in await asyncio.gather(*ranks, return_exceptions=True):
        assert isinstance(error, HandshakeError)
        assert str(error).startswith(
            "rank 0 has neither certificates nor a join token, but the other ranks have; give every process the same SHARDNET_TOKEN"
        )


@pytest.mark.parametrize("said", ["", "[]", "no JSON", '{"address": "10.0.0.1:1"}'])
async def test_what_something_else_has_left(said: str) -> None:
    store = HashStore()
    store.set("shardnet/world 0/rank 1", said)
    with pytest.raises(ProtocolError, match="rank 1's entry in torch's store is not one of this version of shardnet"):
        await come(store, 0, 2)


def test_a_group_needs_a_world_that_is_shardnets() -> None:
    register()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StateError, match="needs a default group of backend 'shardnet'"):
            dist.new_group([0], backend="shardnet")
    finally:
        dist.destroy_process_group()
