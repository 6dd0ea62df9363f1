"""Values of all ranks, on every rank or on one."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.errors import ProtocolError
from shardnet.testing import each_rank, loopback_cluster


async def test_values_of_any_length_are_gathered_in_rank_order() -> None:
    async def work(backend: Backend) -> list[object]:
        return await gather_json(backend, {"rank": backend.rank, "text": "x" * 1000 * backend.rank}, "test")

    async with loopback_cluster(3) as backends:
        assert await each_rank(backends, work) == [[{"rank": rank, "text": "x" * 1000 * rank} for rank in range(3)]] * 3


@pytest.mark.parametrize("world_size", [1, 3])
async def test_large_values_go_only_to_the_rank_that_needs_them(world_size: int) -> None:
    async def work(backend: Backend) -> list[object]:
        return await gather_json(backend, ["x" * 1000 * backend.rank], "test", to=world_size - 1)

    async with loopback_cluster(world_size) as backends:
        *others, last = await each_rank(backends, work)
        assert last == [["x" * 1000 * rank] for rank in range(world_size)]
        assert others == [[]] * (world_size - 1)
        received = [backend.telemetry.bytes_received for backend in backends]
        assert all(each < 1000 for each in received[:-1]), received


async def test_what_is_no_json_is_a_protocol_error_naming_the_rank() -> None:
    async def work(backend: Backend) -> None:
        if backend.rank == 1:  # as gather_json does, with other bytes
            await backend.all_gather(torch.tensor([3]), label="test sizes")
            await backend.all_gather(torch.tensor([1, 2, 3], dtype=torch.uint8), sizes=[4, 3], label="test")
            return
        with pytest.raises(ProtocolError, match="rank 1 sent data for test that is not valid JSON"):
            await gather_json(backend, "me", "test")

    async with loopback_cluster(2) as backends:
        await each_rank(backends, work)
