"""Compressed communication: who computes with which values, what goes over the wire, and what is never rounded."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import CollectiveError, CollectiveMismatch, DtypeError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, Compression, GradScaler, MixedPrecision, memory_report
from shardnet.sharding import ShardingStrategy
from shardnet.telemetry import OpCounter
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
HALF, FLOAT = torch.bfloat16, torch.float32
SHARDED = [(FULL, 3, None), (GRAD, 2, None), (HYBRID, 4, 2)]
WEIGHTS = [Compression(weights="bfloat16"), Compression(weights="int8"), Compression(weights="int8", block=16)]
GRADIENTS = Compression(gradients="int8")
INT8 = Compression(weights="int8", gradients="int8")
WIDE = {"width": 66, "layers": 2}  # shards of many blocks


class Probe(nn.Linear):
    """Notes what it computes with, in forward and in backward."""

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


class Scaled(nn.Module):
    """y = w . x: the gradient of w is x."""

    def __init__(self, numel: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient(model: FSDP, x: Tensor) -> Tensor:
    """This rank's part of the gradient of a step with x."""
    (weight,) = model.parameters()
    weight.grad = None
    model(x).backward()
    (received,) = (parameter.grad for parameter in model.parameters())
    assert received is not None
    return received


def counted(backend: Backend, op: str) -> OpCounter:
    return backend.telemetry.ops.get(op, OpCounter())


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


# --- gradients


@pytest.mark.parametrize("residual", [HALF, FLOAT, None])
def test_the_sum_of_many_gradients_is_right_with_error_feedback_only(residual: torch.dtype | None) -> None:
    """A gradient of 1 beside one of 1000, which cancels over ranks: alone it rounds to 0."""
    steps = 40

    def work(backend: Backend) -> float:
        model = FSDP(Scaled(4), backend, compression=Compression(gradients="int8", residual=residual))
        x = torch.tensor([1000.0 * (-1) ** backend.rank, 1.0, 0.0, 0.0])
        total = torch.stack([gradient(model, x) for _ in range(steps)]).sum(0)
        return total[1].item() if backend.rank == 0 else 0.0

    total = run_ranks(2, work)[0]
    if residual is None:
        assert total == 0
    else:
        assert total == pytest.approx(steps, abs=1000 / 127)


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_arrives_so_and_is_forgotten(planted: float) -> None:
    def work(backend: Backend) -> list[Tensor]:
        model = FSDP(Scaled(40), backend, compression=Compression(gradients="int8", block=16))
        results = []
        for broken in (False, True, False, False):
            x = torch.arange(1.0, 41.0)
            if broken and backend.rank == 1:
                x[2] = planted
            results.append(gradient(model, x))
        return results

    first, second = run_ranks(2, work)  # of 40 elements rank 0 has a block of 16 and one of 4
    assert first[1][:16].isnan().all()
    assert first[1][16:].isfinite().all()
    for step in (0, 2, 3):
        torch.testing.assert_close(first[step], torch.arange(1.0, 21.0), rtol=0, atol=20 / 127)
    for result in second:
        torch.testing.assert_close(result, torch.arange(21.0, 41.0), rtol=0, atol=40 / 127)


def test_an_overflow_makes_every_rank_skip_one_step() -> None:
    def work(backend: Backend) -> list[tuple[float, float]]:
        model = FSDP(Scaled(6), backend, compression=INT8)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), GradScaler(backend, init_scale=1024.0)
        (weight,) = model.parameters()
        results = []
        for overflows in (True, False):
            x = torch.full((6,), math.inf if overflows and backend.rank == 1 else 1.0)
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            results.append((scaler.get_scale(), weight[0].item()))
        return results

    for skipped, taken in run_ranks(3, work):
        assert skipped == (512.0, 1.0)
        assert taken[0] == 512.0
        assert taken[1] == pytest.approx(0.0, abs=1e-5)


def test_weights_that_are_not_finite_are_not_hidden() -> None:
    def work(backend: Backend) -> tuple[float, list[float]]:
        model = FSDP(Weighted(1.0, 2.0, 3.0, 4.0), backend, compression=INT8)
        (weight,) = model.parameters()
        if backend.rank == 1:
            with torch.no_grad():
                weight[0] = math.inf
        return model(torch.tensor(1.0)).item(), model.full_state_dict()["weight"].tolist()

    for result, masters in run_ranks(2, work):
        assert math.isnan(result)
        assert masters == [1.0, 2.0, math.inf, 4.0]


def test_no_sync_quantizes_the_sum_once() -> None:
    def work(backend: Backend) -> tuple[list[float], int]:
        model = FSDP(Scaled(2), backend, compression=GRADIENTS)
        with model.no_sync():
            model(torch.tensor([100.0, 0.3])).backward()
            model(torch.tensor([-99.0, 0.3])).backward()
        before = counted(backend, "all_to_all").count
        model(torch.tensor([0.0, 0.4])).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist(), counted(backend, "all_to_all").count - before

    for gradients, reductions in run_ranks(2, work):
        assert gradients == pytest.approx([1.0])
        assert reductions == 1


def test_unused_and_frozen_parameters() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.used + self.frozen) * x).sum()

    def work(backend: Backend) -> None:
        model = FSDP(Branches(), backend, compression=INT8)
        parameters = dict(model.named_parameters())
        parameters["frozen"].requires_grad_(False)
        for _ in range(2):
            model(torch.ones(2)).backward()
        model.clip_grad_norm_(1.0)
        assert parameters["frozen"].grad is None
        for name, expected in (("used", 2**-0.5), ("unused", 0.0)):
            grad = parameters[name].grad
            assert grad is not None
            torch.testing.assert_close(grad, torch.full_like(grad, expected), rtol=1e-4, atol=1e-6)

    run_ranks(2, work)


# --- memory


@pytest.mark.parametrize(("residual", "itemsize"), [(None, 0), (HALF, 2), (FLOAT, 4)])
def test_residuals_are_counted_for_what_they_are(residual: torch.dtype | None, itemsize: int) -> None:
    parameters = sum(parameter.numel() for parameter in make_gpt().parameters())

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], compression=Compression("int8", "int8", residual=residual))
        assert memory_report(model).gradient_residuals == 0
        for batch in token_batches(2, 1):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        held = memory_report(model)
        assert held.gradient_residuals == itemsize * parameters
        assert held.persistent == held.parameter_shards + held.gradient_shards + held.gradient_residuals
        assert held.packed == held.full_gradients == held.full_parameters == 0
        assert 0 < held.peak_packed < 2 * parameters
        assert held.pooled <= held.peak_full_parameters + held.peak_full_gradients + held.peak_packed
        model.unwrap()
        assert memory_report(model).gradient_residuals == 0

    run_ranks(3, work)


def test_packed_gradients_are_no_full_ones() -> None:
    """What waits for the network is packed: full-size gradients are those of the unit in backward and of the root."""

    def work(backend: Backend, compression: Compression) -> int:
        model = FSDP(make_gpt(layers=5), backend, units=[Block], compression=compression)
        loss_of(model, token_batches(1, 1)[0]).backward()  # type: ignore[no-untyped-call]
        return memory_report(model).peak_full_gradients

    whole, block = (sum(parameter.nbytes for parameter in module.parameters()) for module in (make_gpt(layers=5), Block(18, 3)))
    assert run_ranks(2, lambda backend: work(backend, GRADIENTS)) == [whole - 5 * block + block] * 2
    assert run_ranks(2, lambda backend: work(backend, Compression())) > [whole - 5 * block + block] * 2


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
        (WEIGHTS[0], {"strategy": NONE}, "NO_SHARD has none"),
        (GRADIENTS, {"strategy": NONE}, "NO_SHARD has none"),
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


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (INT8, None, r"all_gather\("),
        (INT8, Compression(weights="bfloat16"), r"all_gather\("),
        (INT8, Compression("int8", "int8", block=512), r"Weighted as int8 in blocks of (256|512)"),
        (GRADIENTS, None, r"all_to_all\(|reduce_scatter\("),
        (GRADIENTS, Compression(gradients="int8", block=512), r"Weighted as int8 in blocks of (256|512)"),
    ],
)
def test_ranks_that_compress_differently_are_told_so(mine: Compression, theirs: Compression | None, message: str) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend, compression=theirs if backend.rank else mine)
        with pytest.raises(CollectiveMismatch, match=message):
            model(torch.tensor(1.0)).backward()
        with pytest.raises(CollectiveMismatch, match=message):
            model(torch.tensor(1.0)).backward()  # cleans up what the first left, and fails as it must
        model.unwrap()
        held = memory_report(model)
        assert held.packed == held.full_parameters == held.full_gradients == held.gradient_residuals == 0

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
    """The next all_to_all of this rank is not what the others are in."""
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
