"""Only operations that all ranks have agreed on may be launched."""

import pytest

from shardnet.backend import Backend, LoopbackBackend
from shardnet.backend.agreement import agree, confirm
from shardnet.backend.pending import Pending
from shardnet.collectives.operation import Call, Operation
from shardnet.errors import ShardnetError
from shardnet.testing import each_error, each_rank, loopback_cluster

WORLD_SIZE = 3


def begin(rank: LoopbackBackend, launched: list[int], *, fails: bool) -> Pending[None]:
    async def run(op: Operation) -> None:
        await agree(op)
        if fails:
            raise MemoryError("before it has said that it has agreed")
        await confirm(op)
        launched.append(op.group.rank)

    return Pending(rank._group.operations.begin(Call("all_gather", "", "", 10.0, "all_gather"), run, None), "all_gather")


async def test_all_launch_what_all_have_agreed_on() -> None:
    launched: list[int] = []
    async with loopback_cluster(WORLD_SIZE) as ranks:
        await each_rank(ranks, lambda rank: begin(ranks[rank.rank], launched, fails=False))
    assert sorted(launched) == list(range(WORLD_SIZE))


@pytest.mark.parametrize("odd", range(WORLD_SIZE))
async def test_nobody_launches_what_one_has_given_up_behind_its_announcement(odd: int) -> None:
    """By then all others have heard its announcement, but not its last message."""
    launched: list[int] = []

    async def work(rank: Backend) -> None:
        try:
            await begin(ranks[rank.rank], launched, fails=rank.rank == odd)
        except MemoryError as error:
            raise ShardnetError(str(error)) from error

    async with loopback_cluster(WORLD_SIZE) as ranks:
        await each_error(ranks, work)
    assert launched == []
