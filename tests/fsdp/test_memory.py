"""Counted bytes: a rank holds its share, plus the units in flight, whatever the depth of the model."""

import gc
import weakref

import pytest
import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, MemoryReport, memory_report
from shardnet.fsdp.group import FlatGroup
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

WORLD_SIZE = 4
SIZES = {"vocabulary": 31, "width": 18, "heads": 3}


def bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def measure(layers: int, prefetch: int) -> list[MemoryReport]:
    def work(backend: Backend) -> MemoryReport:
        model = FSDP(make_gpt(layers=layers, **SIZES), backend, units=[Block], prefetch=prefetch)
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in token_batches(3, WORLD_SIZE):
            loss_of(model, batch[backend.rank :][:1]).backward()  # type: ignore[no-untyped-call]
            report = memory_report(model, optimizer)
            optimizer.step()
        return MemoryReport(**{name: getattr(report, name) for name in MemoryReport.__slots__})

    return run_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_rank_holds_a_quarter_and_the_units_in_flight(prefetch: int) -> None:
    layers = 8
    whole = bytes_of(make_gpt(layers=layers, **SIZES))
    block = bytes_of(Block(SIZES["width"], SIZES["heads"]))
    root = whole - layers * block
    reports = measure(layers, prefetch)
    rounding = 4 * (layers + 1)  # a shard of each unit may be one float32 longer than a quarter
    steps = 4 * len(list(make_gpt(layers=layers, **SIZES).parameters()))  # AdamW's step counters, one float32 each
    assert sum(report.parameter_shards for report in reports) == whole
    assert sum(report.gradient_shards for report in reports) == whole
    for report in reports:
        assert report.parameter_shards <= whole / WORLD_SIZE + rounding
        assert report.gradient_shards <= whole / WORLD_SIZE + rounding
        assert report.optimizer_state <= 2 * (whole / WORLD_SIZE + rounding) + steps
        assert report.persistent <= 4 * (whole / WORLD_SIZE + rounding) + steps
        assert root + block <= report.peak_full_parameters <= root + (1 + prefetch) * block
        assert report.peak_full_gradients <= root + (2 + prefetch) * block
        assert report.full_parameters == report.full_gradients == 0
        assert report.pooled <= report.peak_full_parameters + report.peak_full_gradients


def test_what_is_in_flight_does_not_grow_with_depth() -> None:
    shallow, deep = measure(4, 1)[0], measure(12, 1)[0]
    assert shallow.peak_full_parameters == deep.peak_full_parameters
    assert shallow.peak_full_gradients == deep.peak_full_gradients
    assert deep.parameter_shards > 2 * shallow.parameter_shards


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_between_forward_and_backward_the_root_and_the_last_units_are_held(prefetch: int) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(**SIZES), backend, units=[Block], prefetch=prefetch)
        root, *blocks = (sum(group.full_bytes for group in unit.groups) for unit in model.units)
        loss = loss_of(model, token_batches(1, 2)[0])
        assert memory_report(model).full_parameters == root + prefetch * blocks[0]
        gathers = backend.telemetry.ops["all_gather"].count
        assert gathers == 1 + len(blocks)
        assert all(parameter.dim() == 1 for parameter in model.parameters())
        loss.backward()  # type: ignore[no-untyped-call]
        assert memory_report(model).full_parameters == 0
        assert backend.telemetry.ops["all_gather"].count - gathers == len(blocks) - prefetch

    run_ranks(2, work)


def test_a_model_that_is_dropped_is_gone() -> None:
    """Also after a backward, which keeps hooks where Python's cycle collector does not look."""

    def work(backend: Backend) -> tuple[weakref.ref[FSDP], weakref.ref[FlatGroup]]:
        model = FSDP(make_gpt(layers=2, **SIZES), backend, units=[Block])
        for batch in token_batches(2, WORLD_SIZE):
            loss_of(model, batch[backend.rank :][:1]).backward()  # type: ignore[no-untyped-call]
        return weakref.ref(model), weakref.ref(model.groups[0])

    found = run_ranks(WORLD_SIZE, work)
    while gc.collect():  # each run frees only one layer of autograd's graphs
        pass
    assert [reference() for references in found for reference in references] == [None] * 2 * WORLD_SIZE
