"""Gathered parameters exist once per node: its ranks compute with the same memory, and nothing else changes."""

import asyncio
import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend
from shardnet.config import KIB, Limits
from shardnet.errors import ShardnetError
from shardnet.fsdp import FSDP
from shardnet.fsdp.group import FlatGroup
from shardnet.sharding import FlatLayout
from shardnet.testing import local_cluster, loopback_cluster
from tests.devices import on_test_device
from tests.segments import NAME, mappings, since_now

LIMITS = Limits(chunk_bytes=8 * KIB, window_bytes=32 * KIB, inline_bytes=64, eager_bytes=KIB)
STEPS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(40, 80), nn.Linear(80, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.tanh(self.widen(x)))
        return out


ORIGINAL = nn.Sequential(*(Layer() for _ in range(4)))


def make() -> nn.Sequential:
    return copy.deepcopy(ORIGINAL)


def layers(model: FSDP) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def shard(backend: Backend) -> FSDP:
    return FSDP(make(), backend, units=[Layer])


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [on_test_device(torch.randn(3, 40, generator=generator, device="cpu")) for _ in range(STEPS)]


def train(backend: Backend) -> list[torch.Tensor]:
    model = shard(backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(backend.rank):
        F.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return list(model.full_state_dict().values())


def in_a_segment(tensor: torch.Tensor) -> bool:
    for line in mappings():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return NAME in line
    return False


@pytest.mark.parametrize("per_node", [1, 2, 4])
async def test_no_bit_depends_on_where_parameters_lie(per_node: int) -> None:
    async with loopback_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks:
        expected = (await asyncio.gather(*(asyncio.to_thread(train, rank) for rank in ranks)))[0]
    async with local_cluster(4, ranks_per_node=per_node, limits=LIMITS) as backends:
        for state in await asyncio.gather(*(asyncio.to_thread(train, backend) for backend in backends)):
            assert all(torch.equal(value, other) for value, other in zip(state, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_forward_and_backward_read_the_same_memory(dtype: torch.dtype) -> None:
    seen: list[bool] = []

    def work(backend: Backend) -> None:
        model = make().to(dtype)
        for unit in (module for module in model if isinstance(module, Layer)):
            unit.widen.register_forward_hook(lambda layer, *_: seen.append(in_a_segment(layer.weight)))
        sharded = FSDP(model, backend, units=[Layer])
        sharded(torch.ones(2, 40, dtype=dtype)).sum().backward()
        assert sharded.memory.full_parameters.current_bytes == 0

    async with local_cluster(2, limits=LIMITS) as ranks:
        await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
    assert seen == [True] * 8


async def test_what_is_whole_for_a_moment_is_there_once_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the first values on their way to the shards, and parameters that are saved or restored."""
    adopt, views, seen = FlatGroup.adopt, FlatLayout.views, list[bool]()

    def look(group: FlatGroup, flat: torch.Tensor) -> None:
        seen.append(in_a_segment(flat))
        adopt(group, flat)

    def look_at_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
        seen.append(in_a_segment(flat))
        return views(layout, flat)

    def work(backend: Backend) -> FSDP:
        model = make()
        if backend.rank:
            for parameter in model.parameters():
                parameter.data.fill_(9.0)
        return FSDP(model, backend, units=[Layer])

    async with local_cluster(3, limits=LIMITS) as ranks:
        monkeypatch.setattr(FlatGroup, "adopt", look)
        models = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
        assert seen == [True] * 12
        seen.clear()
        monkeypatch.setattr(FlatLayout, "views", look_at_views)
        states = await asyncio.gather(*(asyncio.to_thread(model.full_state_dict, rank0_only=True) for model in models))
        assert seen == [True] * 4  # of the rank that keeps them
        assert [len(state) for state in states] == [len(ORIGINAL.state_dict()), 0, 0]
        assert all(torch.equal(value, ORIGINAL.state_dict()[name]) for name, value in states[0].items())
        for whole in await asyncio.gather(*(asyncio.to_thread(model.unwrap) for model in models)):
            assert not any(in_a_segment(parameter) for parameter in whole.parameters())
            assert all(torch.equal(value, ORIGINAL.state_dict()[name]) for name, value in whole.state_dict().items())


async def test_parameters_that_are_written_in_forward_are_the_writers_own() -> None:
    """As without shared memory no other rank computes with them, and the next gather brings the shards' values."""

    def work(backend: Backend) -> torch.Tensor:
        model = shard(backend)

        def scale(layer: Layer, _: object) -> None:
            layer.widen.weight.data.mul_(backend.rank + 1.0)

        handle = layers(model)[1].register_forward_pre_hook(scale)
        outputs = [model(torch.ones(2, 40)).detach() for _ in range(3)]
        handle.remove()
        outputs.append(model(torch.ones(2, 40)).detach())
        return torch.stack(outputs)

    async with local_cluster(3, limits=LIMITS) as ranks:
        ours = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
    async with loopback_cluster(3) as reference:
        theirs = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in reference))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], ours[1])


async def test_one_rank_without_shared_memory_changes_no_bit() -> None:
    async with loopback_cluster(3, limits=LIMITS) as reference:
        expected = (await asyncio.gather(*(asyncio.to_thread(train, rank) for rank in reference)))[0]
    async with local_cluster(3, limits=LIMITS, shared_memory=lambda rank: rank != 1) as ranks:
        for state in await asyncio.gather(*(asyncio.to_thread(train, rank) for rank in ranks)):
            assert all(torch.equal(value, other) for value, other in zip(state, expected, strict=True))


async def test_parameters_without_elements() -> None:
    def work(backend: Backend) -> None:
        model = make()
        model.append(nn.Identity())
        model[-1].register_parameter("nothing", nn.Parameter(torch.empty(0)))
        sharded = FSDP(model, backend, units=[Layer, nn.Identity])
        for _ in range(2):
            sharded(torch.ones(2, 40)).sum().backward()

    async with local_cluster(2, limits=LIMITS) as ranks:
        await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))


async def test_the_whole_model_is_there_once_a_node_and_for_a_while() -> None:
    """It is summoned. After that a step takes no more memory than before."""
    deep = nn.Sequential(*(Layer() for _ in range(10)))

    def work(backend: Any) -> tuple[int, int, int]:
        model = FSDP(copy.deepcopy(deep), backend, units=[Layer])
        slots = []
        for summons in (False, True, False):
            for _ in range(3):
                model(batches(0)[0]).sum().backward()
            with model.summon_full_params() if summons else nullcontext():
                slots.append(len(backend._group.commons._slots))
        return slots[0], slots[1], slots[2]

    async with local_cluster(4, limits=LIMITS) as ranks:
        before, within, behind = (await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks)))[0]
    assert max(before, behind) <= 6 < len(deep) <= within


def _fails_in_forward(model: FSDP) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    handle = layers(model)[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(torch.ones(2, 40))
    handle.remove()


def _fails_in_backward(model: FSDP) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    handle = layers(model)[2].register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(torch.ones(2, 40, requires_grad=True)).sum().backward()
    handle.remove()


def _prefetches_in_vain(model: FSDP) -> None:
    for handle in model.prefetch_forward_params():
        handle.wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)


@pytest.mark.parametrize("trouble", [_fails_in_forward, _fails_in_backward, _prefetches_in_vain])
async def test_nothing_stays_behind(trouble: Callable[[FSDP], None]) -> None:
    """Memory that was allocated for a unit and not used is given back: the next step manages with what there is."""

    def work(backend: Backend) -> torch.Tensor:
        model = shard(backend)
        outputs = [model(torch.ones(2, 40)).detach()]
        for _ in range(8):
            trouble(model)
            model.zero_grad()
            output = model(torch.ones(2, 40))
            output.sum().backward()
            outputs.append(output.detach())
        assert model.memory.full_parameters.current_bytes == 0
        return torch.stack(outputs)

    segments = since_now()
    async with local_cluster(2, limits=LIMITS) as ranks:
        ours = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
        assert segments() <= 2 * 2 * 8
    async with loopback_cluster(2) as reference:
        theirs = await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in reference))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


async def test_a_peer_that_is_lost_in_the_middle_leaves_a_typed_error() -> None:
    both_are_through = threading.Barrier(2)
    async with local_cluster(2, limits=LIMITS) as ranks:

        def work(backend: Backend) -> None:
            model = shard(backend)
            model(torch.ones(2, 40))
            both_are_through.wait(10.0)
            if backend.rank == 1:
                backend.abort()
            with pytest.raises(ShardnetError):
                model(torch.ones(2, 40))

        await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in ranks))
        ranks[0].abort()
