"""Compressed communication: which values modules compute with, what goes over the wire, and what is never rounded."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import CollectiveError, CollectiveMismatch, DtypeError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, Compression, MixedPrecision, memory_report
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.scaled import Scaled, counted, gradient

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
HALF, FLOAT = torch.bfloat16, torch.float32
SHARDED = [(FULL, 3, None), (GRAD, 2, None), (HYBRID, 4, 2)]
WEIGHTS = [Compression(weights="bfloat16"), Compression(weights="int8"), Compression(weights="int8", block=16)]
GRADIENTS = Compression(gradients="int8")
INT8 = Compression(weights="int8", gradients="int8")
WIDE = {"width": 66, "layers": 2}  # shards of many blocks


class Probe(nn.Linear):
    """Records the values that it computes with, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__(9, 9)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look())  # type: ignore[no-untyped-call]
        return y * 1

    def look(self) -> None:
        self.seen.append(torch.cat([self.weight.detach().reshape(-1), self.bias.detach()]))


# --- traffic


@pytest.mark.parametrize(("strategy", "world_size", "node"), SHARDED)
def test_bytes_on_the_wire(strategy: ShardingStrategy, world_size: int, node: int | None) -> None:
    def work(backend: Backend, compression: Compression | None) -> tuple[int, int, int]:
        model = FSDP(make_gpt(**WIDE), backend, units=[Block], strategy=strategy, intra_node_size=node, compression=compression)
        for batch in token_batches(2, 1):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        reduced = counted(backend, "reduce_scatter").bytes + counted(backend, "all_to_all").bytes
        return counted(backend, "all_gather").bytes, reduced, counted(backend, "all_reduce").bytes

    def sent(compression: Compression | None) -> tuple[int, int, int]:
        return run_ranks(world_size, lambda backend: work(backend, compression))[0]

    gathered, reduced, averaged = sent(None)
    assert sent(WEIGHTS[0]) == (gathered // 2, reduced, averaged)
    assert sent(WEIGHTS[1])[1:] == (reduced, averaged)
    assert sent(WEIGHTS[1])[0] <= 0.27 * gathered
    assert sent(GRADIENTS)[::2] == (gathered, averaged)
    assert sent(GRADIENTS)[1] <= 0.27 * reduced


# --- what modules compute with


@pytest.mark.parametrize("compression", WEIGHTS, ids=str)
@pytest.mark.parametrize(
    ("strategy", "world_size", "node", "reshard"), [*((*place, None) for place in SHARDED), (FULL, 4, None, 2), (FULL, 2, None, False)]
)
def test_all_ranks_compute_with_the_same_rounded_values_and_the_masters_stay(
    strategy: ShardingStrategy, world_size: int, node: int | None, reshard: bool | int | None, compression: Compression
) -> None:
    made = [nn.Sequential(*(Probe() for _ in range(3))) for _ in range(world_size)]
    exact = {name: value.clone() for name, value in made[0].state_dict().items()}

    def work(backend: Backend) -> list[list[Tensor]]:
        module = made[backend.rank]
        options: dict[str, Any] = {"strategy": strategy, "intra_node_size": node, "reshard_after_forward": reshard, "prefetch": 0}
        model = FSDP(module, backend, units=[Probe], compression=compression, **options)
        for _ in range(2):
            model(torch.ones(1, 9)).sum().backward()
            check_at_rest(model)
        assert memory_report(model).packed == 0
        state = model.full_state_dict()
        assert all(torch.equal(state[name], value) for name, value in exact.items())
        assert all(torch.equal(value, exact[name]) for name, value in model.unwrap().named_parameters())
        return [probe.seen for probe in module if isinstance(probe, Probe)]

    first, *others = run_ranks(world_size, work)
    for index, seen in enumerate(first):
        assert len(seen) == 4  # two forwards, two backwards
        masters = torch.cat([exact[f"{index}.weight"].reshape(-1), exact[f"{index}.bias"]])
        for values in (*seen, *(value for ranks in others for value in ranks[index])):
            assert torch.equal(values, seen[0])
            assert values.dtype == FLOAT
        assert not torch.equal(seen[0], masters)
        torch.testing.assert_close(seen[0], masters, rtol=0, atol=masters.abs().max().item() / 250)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_an_update_after_an_explicit_prefetch_is_seen_where_it_shows(weights: Any) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend, compression=Compression(weights=weights))
        (weight,) = model.parameters()

        def forward_after(change: float) -> tuple[float, int]:
            for gather in model.prefetch_forward_params():
                gather.wait()
            with torch.no_grad():
                weight[:1].add_(change)  # of rank 0's [1, 2] and of rank 1's [3, 4], whose scales are those of 2 and 4
            before = counted(backend, "all_gather").count
            return model(torch.tensor(1.0)).item(), counted(backend, "all_gather").count - before

        for change, gathers in ((2.0**-20, 0), (0.5, 1)):  # the first is lost in rounding
            result, gathered = forward_after(change)
            assert result == pytest.approx(10 + 2 * change, abs=0.04)
            assert gathered == gathers

    run_ranks(2, work)


def test_parameters_updated_for_all_are_there_for_the_next_forward() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend, strategy=GRAD, compression=INT8)
        (weight,) = model.parameters()
        model.update_shards(2 * weight.detach())
        model.broadcast_updated_params()
        before = counted(backend, "all_gather").count
        assert model(torch.tensor(1.0)).item() == pytest.approx(20, abs=0.08)
        assert counted(backend, "all_gather").count == before

    run_ranks(2, work)


def test_mixed_precision_computes_in_its_dtype_with_compressed_parameters() -> None:
    def work(backend: Backend) -> int:
        module = nn.Sequential(Probe())
        policy = MixedPrecision(HALF, output_dtype=FLOAT)
        model = FSDP(module, backend, units=[Probe], mixed_precision=policy, compression=INT8)
        model(torch.ones(1, 9)).sum().backward()
        (probe,) = module
        assert isinstance(probe, Probe)
        assert {value.dtype for value in probe.seen} == {HALF}
        assert all(parameter.grad is not None and parameter.grad.dtype == FLOAT for parameter in model.parameters())
        return counted(backend, "all_gather").bytes

    bytes_sent = run_ranks(2, work)
    assert bytes_sent == [45 + 4] * 2  # of 90 elements each rank's 45 codes and one scale, gathered once


@pytest.mark.parametrize("world_size", [3, 4])
def test_tiny_and_empty_shards(world_size: int) -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(Weighted(1.0, 2.0), backend, compression=INT8)
        assert model(torch.tensor(1.0)).item() == pytest.approx(3, rel=1e-6)
        return gradient(model, torch.tensor(float(backend.rank))).tolist()

    gradients = run_ranks(world_size, work)
    mean = sum(range(world_size)) / world_size
    assert gradients == [[pytest.approx(mean)], [pytest.approx(mean)], *[[]] * (world_size - 2)]


@pytest.mark.parametrize(("strategy", "world_size", "node"), [(FULL, 1, None), (HYBRID, 2, 1)])
def test_where_a_rank_has_everything_nothing_is_rounded(strategy: ShardingStrategy, world_size: int, node: int | None) -> None:
    value = 1 + 2.0**-20

    def work(backend: Backend) -> None:
        model = FSDP(Scaled(2), backend, strategy=strategy, intra_node_size=node, compression=INT8)
        model.update_shards(torch.tensor([value, 1.0]))
        assert model(torch.ones(2)).item() == value + 1
        assert gradient(model, torch.tensor([value, 100.0])).tolist() == [value, 100.0]
        assert memory_report(model).gradient_residuals == 0

    run_ranks(world_size, work)


# --- refusals and failures


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"weights": "int4"}, UsageError, "weights must be 'bfloat16', 'int8' or None, got 'int4'"),
        ({"gradients": "bfloat16"}, UsageError, "gradients must be 'int8' or None, got 'bfloat16'"),
        ({"block": 15}, UsageError, "block must be a number of at least 16 elements, got 15"),
        ({"block": 256.0}, UsageError, "block must be a number of at least 16 elements, got 256.0"),
        ({"residual": torch.float16}, DtypeError, "residual must be torch.bfloat16, torch.float32 or None, got torch.float16"),
    ],
)
def test_settings_that_mean_nothing(wrong: dict[str, Any], error: type[UsageError], message: str) -> None:
    with pytest.raises(error, match=message):
        Compression(**wrong)


@pytest.mark.parametrize(
    ("compression", "options", "message"),
    [
        (WEIGHTS[0], {"strategy": NONE}, "NO_SHARD has no shards"),
        (GRADIENTS, {"strategy": NONE}, "NO_SHARD has no shards"),
        (WEIGHTS[0], {"mixed_precision": MixedPrecision(HALF)}, "gathered as torch.bfloat16 already"),
        (INT8, {"mixed_precision": MixedPrecision(HALF, HALF)}, "added up in float32; leave reduce_dtype torch.bfloat16 out"),
    ],
)
def test_settings_that_contradict_others(compression: Compression, options: dict[str, Any], message: str) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=message):
            FSDP(Weighted(), backend, compression=compression, **options)

    run_ranks(2, work)


def test_no_compression_goes_with_every_strategy() -> None:
    run_ranks(2, lambda backend: FSDP(Weighted(), backend, strategy=NONE, compression=Compression(block=64)))


@pytest.mark.parametrize("theirs", [None, Compression(weights="bfloat16"), Compression("int8", "int8", block=512)])
def test_ranks_that_compress_differently_are_told_so(theirs: Compression | None) -> None:
    def work(backend: Backend) -> None:
        expected = re.escape(f"rank 0 has {INT8}, but rank 1 has {theirs or Compression()}; ")
        with pytest.raises(CollectiveMismatch, match=expected):
            FSDP(Weighted(), backend, compression=theirs if backend.rank else INT8)

    run_ranks(2, work)


def test_what_fails_within_a_node_fails_everywhere_and_training_goes_on() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)),
            backend,
            units=[nn.Linear],
            strategy=HYBRID,
            intra_node_size=2,
            compression=INT8,
        )
        loss = model(torch.ones(2, 3)).sum()
        if backend.rank == 0:
            mislabel_next(model._comms.reductions)
        with pytest.raises(CollectiveError):
            loss.backward()
        held = memory_report(model)
        assert held.packed == held.full_parameters == held.full_gradients == held.gradient_residuals == 0
        model.zero_grad()
        model(torch.full((1, 3), float(backend.rank))).sum().backward()
        bias = dict(model.named_parameters())["1.bias"].grad
        assert bias is None or bias.tolist() in ([pytest.approx(1.0, abs=0.02)], [])

    run_ranks(4, work)


def mislabel_next(group: Backend) -> None:
    """Make this rank's next all_to_all differ from the others'."""
    real = group.all_to_all

    def mistaken(*args: Any, label: str, **options: Any) -> Any:
        vars(group).pop("all_to_all")
        return real(*args, label=f"not {label}", **options)

    vars(group)["all_to_all"] = mistaken


async def test_the_async_model_compresses() -> None:
    (backend,) = LoopbackBackend.create_group(1)
    with pytest.raises(UsageError, match="NO_SHARD"):
        await AsyncFSDP(Weighted(), backend, strategy=NONE, compression=INT8)
    await backend.aclose()
