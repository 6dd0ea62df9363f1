"""Mixed precision: which dtype modules see, what goes over the wire, and what is never rounded."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import CollectiveMismatch, DtypeError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, MixedPrecision, memory_report
from shardnet.sharding import ShardingStrategy
from shardnet.telemetry import OpCounter
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
HALF, FLOAT = torch.bfloat16, torch.float32
EVERY_PLACE = [(FULL, 2, None), (GRAD, 2, None), (NONE, 2, None), (HYBRID, 4, 2), (HYBRID, 2, 1), (FULL, 1, None)]


class Probe(nn.Linear):
    """Records the dtypes that it computes with, each time."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, self.weight.dtype, self.offset.dtype))
        return super().forward(x) + self.offset.to(x.dtype)


def trained(model: FSDP, x: Tensor) -> list[Tensor]:
    """The gradients of one step."""
    model(x).float().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [gradient for gradient in gradients if gradient is not None]


# --- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("strategy", "world_size", "node"), EVERY_PLACE)
def test_modules_compute_in_param_dtype_and_the_masters_stay(
    strategy: ShardingStrategy, world_size: int, node: int | None, dtype: torch.dtype
) -> None:
    def work(backend: Backend) -> None:
        module = nn.Sequential(Probe(), Probe())
        policy = MixedPrecision(dtype, FLOAT, output_dtype=FLOAT)
        model = FSDP(module, backend, units=[Probe], strategy=strategy, intra_node_size=node, mixed_precision=policy)
        for _ in range(2):
            out = model(torch.ones(2, 3))
            assert out.dtype == FLOAT
            out.sum().backward()
            check_at_rest(model)
        for probe in module:
            assert probe.seen == [(dtype, dtype, FLOAT)] * 2
        for parameter in model.parameters():
            assert parameter.dtype == FLOAT
            assert parameter.grad is not None
            assert parameter.grad.dtype == FLOAT

    run_ranks(world_size, work)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_recomputation_sees_the_same_dtypes(strategy: ShardingStrategy, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, *, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = Probe(), Probe()
            self.on = on

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            return checkpoint(self.second, x, use_reentrant=reentrant) if self.on else self.second(x)

    def work(backend: Backend) -> list[list[Tensor]]:
        results = []
        for module in made[backend.rank]:
            model = FSDP(module, backend, units=[Probe], strategy=strategy, mixed_precision=MixedPrecision(HALF, FLOAT))
            results.append(trained(model, torch.ones(2, 3)))
            assert module.second.seen == [(HALF, HALF, FLOAT)] * (1 + module.on)
        return results

    made = [(Checkpointed(on=False), Checkpointed(on=True)) for _ in range(2)]
    for without, with_it in run_ranks(2, work):
        assert all(torch.equal(left, right) for left, right in zip(without, with_it, strict=True))


def test_frozen_parameters_are_cast_and_integers_are_not() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(5).flip(0), requires_grad=False)
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
            self.weight = nn.Parameter(torch.arange(5.0))

        def forward(self, x: Tensor) -> Tensor:
            assert [self.order.dtype, self.frozen.dtype, self.weight.dtype] == [torch.int64, HALF, HALF]
            return (x * self.frozen * self.weight)[self.order]

    def work(backend: Backend) -> list[float]:
        model = FSDP(Table(), backend, mixed_precision=MixedPrecision(HALF))
        out: Tensor = model(torch.ones(5))
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert [value.dtype for value in model.state_dict().values()] == [torch.int64, FLOAT, FLOAT]
        return out.tolist()

    assert run_ranks(2, work) == [[4, 3, 2, 1, 0]] * 2


def test_batch_normalisation_keeps_its_dtype_by_the_override() -> None:
    def work(backend: Backend) -> Tensor:
        module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        norms = set(module[1].parameters())
        policy = MixedPrecision(HALF, FLOAT, param_dtype_override_fn=lambda parameter: FLOAT if parameter in norms else None)
        model = FSDP(module, backend, units=[nn.Conv2d], mixed_precision=policy)
        model(torch.ones(2, 1, 5, 5) + backend.rank).sum().backward()
        running = dict(model.named_buffers())["1.running_mean"]
        assert running.dtype == FLOAT
        assert running.any()
        return running

    first, second = run_ranks(2, work)
    assert not torch.equal(first, second), "buffers are each rank's own"


# --- inputs and outputs


@dataclass
class Pair:
    left: Tensor
    right: list[Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.got: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = [args, kwargs]
        return OrderedDict(loss=self.weight * 2, pair=Pair(self.weight * 3, [torch.tensor(1)]))


def test_inputs_and_outputs_are_cast_wherever_they_are() -> None:
    def work(backend: Backend) -> None:
        module = Nested()
        model = FSDP(module, backend, mixed_precision=MixedPrecision(HALF, output_dtype=torch.float64))
        ids, past = torch.arange(3), [1, "text"]
        x = torch.ones(3, requires_grad=True)
        out = model(Pair(x, [ids, x.double()]), past, mask={"m": (x, None)})
        (pair, kept), kwargs = module.got
        assert (pair.left.dtype, pair.right[1].dtype, kwargs["mask"]["m"][0].dtype) == (HALF, HALF, HALF)
        assert pair.right[0] is ids
        assert kept is past, "what the module changes must be what the caller looks at"
        assert type(out) is OrderedDict
        assert (out["loss"].dtype, out["pair"].left.dtype, out["pair"].right[0].dtype) == (torch.float64, torch.float64, torch.int64)
        (out["loss"] + out["pair"].left).sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is None or weight.grad.tolist() in ([5.0], [])

    run_ranks(2, work)


def test_inputs_stay_as_they_are_on_request() -> None:
    def work(backend: Backend) -> None:
        module = Nested()
        model = FSDP(module, backend, mixed_precision=MixedPrecision(HALF, cast_forward_inputs=False))
        out = model(torch.ones(3))
        assert module.got[0][0].dtype == FLOAT
        assert out["loss"].dtype == HALF

    run_ranks(2, work)


# --- rounding


def test_no_sync_adds_up_in_float32_whatever_is_reduced() -> None:
    """256 + 1 + 1: in bfloat16 the sum would stay 256."""

    def work(backend: Backend, policy: MixedPrecision) -> list[float]:
        model = FSDP(Weighted(), backend, mixed_precision=policy)
        with model.no_sync():
            model(torch.tensor(256.0)).backward()
            model(torch.tensor(1.0)).backward()
        model(torch.tensor(1.0)).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        check_at_rest(model)
        return weight.grad.tolist()

    for policy in (MixedPrecision(HALF), MixedPrecision(HALF, FLOAT), MixedPrecision(HALF, HALF), MixedPrecision(FLOAT, HALF)):
        assert run_ranks(2, lambda backend, policy=policy: work(backend, policy)) == [[258, 258]] * 2  # type: ignore[misc]


@pytest.mark.parametrize(("reduce_dtype", "expected"), [(FLOAT, 128.5), (HALF, 128.0), (None, 128.0)])
def test_the_mean_is_rounded_to_reduce_dtype(reduce_dtype: torch.dtype | None, expected: float) -> None:
    """(256 + 1) / 2, which bfloat16 cannot hold."""

    def work(backend: Backend) -> list[float]:
        model = FSDP(Weighted(), backend, mixed_precision=MixedPrecision(HALF, reduce_dtype))
        model(torch.tensor([256.0, 1.0][backend.rank])).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(2, work) == [[expected] * 2] * 2


def test_gradients_of_several_steps_add_up_on_the_master() -> None:
    def work(backend: Backend) -> list[float]:
        model = FSDP(Weighted(), backend, mixed_precision=MixedPrecision(HALF))
        for x in (256.0, 1.0):
            model(torch.tensor(x)).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_ranks(2, work) == [[257, 257]] * 2


@pytest.mark.parametrize(("strategy", "world_size", "node"), EVERY_PLACE)
def test_states_and_the_unwrapped_module_have_the_masters(strategy: ShardingStrategy, world_size: int, node: int | None) -> None:
    exact = 1 + 2.0**-20

    def work(backend: Backend) -> None:
        module = Weighted(exact, 2, 3, exact)
        weight = module.weight
        model = FSDP(module, backend, strategy=strategy, intra_node_size=node, mixed_precision=MixedPrecision(HALF))
        assert model(torch.tensor(1.0)).item() == 7
        assert model.full_state_dict()["weight"].tolist() == [exact, 2, 3, exact]
        saved = model.sharded_state_dict()
        model.update_shards(torch.zeros(weight.numel()))
        model.load_sharded_state_dict(saved)
        assert model.unwrap().weight is weight
        assert weight.tolist() == [exact, 2, 3, exact]
        assert module(torch.tensor(1.0)).dtype == FLOAT, "nothing is cast any more"

    run_ranks(world_size, work)


# --- traffic and memory


def test_gathers_send_half_the_bytes() -> None:
    def work(backend: Backend, policy: MixedPrecision | None) -> tuple[int, int]:
        model = FSDP(make_gpt(), backend, units=[Block], mixed_precision=policy)
        loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]
        return backend.telemetry.ops["all_gather"].bytes, backend.telemetry.ops["reduce_scatter"].bytes

    def sent(policy: MixedPrecision | None) -> tuple[int, int]:
        return run_ranks(3, lambda backend: work(backend, policy))[0]

    gathered, reduced = sent(None)
    assert sent(MixedPrecision(HALF, FLOAT)) == (gathered // 2, reduced)
    assert sent(MixedPrecision(HALF)) == (gathered // 2, reduced // 2)
    assert sent(MixedPrecision(reduce_dtype=HALF)) == (gathered, reduced // 2)


@pytest.mark.parametrize("strategy", [GRAD, NONE])
def test_full_parameters_take_half_the_memory(strategy: ShardingStrategy) -> None:
    whole = sum(parameter.nbytes for parameter in make_gpt().parameters())

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], strategy=strategy, mixed_precision=MixedPrecision(HALF))
        for batch in token_batches(2, 2):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        held = memory_report(model)
        assert held.peak_full_parameters == whole // 2  # kept from forward to backward; with NO_SHARD, too, as a cast copy
        assert held.full_parameters == 0
        assert held.peak_full_gradients <= whole // 2
        assert held.gradient_shards == held.parameter_shards

    run_ranks(2, work)


# --- prefetch


@pytest.mark.parametrize(("strategy", "world_size", "node"), [(FULL, 2, None), (HYBRID, 2, 1)])
def test_an_update_after_an_explicit_prefetch_is_seen_where_it_shows(strategy: ShardingStrategy, world_size: int, node: int | None) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend, strategy=strategy, intra_node_size=node, mixed_precision=MixedPrecision(HALF))
        (weight,) = model.parameters()

        def gathers() -> int:
            return backend.telemetry.ops.get("all_gather", OpCounter()).count

        def gathers_of_a_forward(change: float) -> int:
            for gather in model.prefetch_forward_params():
                gather.wait()
            with torch.no_grad():
                weight.mul_(change)
            before = gathers()
            result = model(torch.tensor(1.0)).item()
            assert result == model.full_state_dict()["weight"].bfloat16().sum().item()
            return gathers() - before

        unseen, seen = gathers_of_a_forward(1 + 2.0**-20), gathers_of_a_forward(2.0)
        # One is for the state; the first change is lost in the cast. On nodes of one rank nothing is gathered.
        assert (unseen, seen) == ((1, 2) if node is None else (0, 0))

    run_ranks(world_size, work)


def test_prefetch_changes_no_bit() -> None:
    def work(backend: Backend, prefetch: int) -> dict[str, Tensor]:
        model = FSDP(make_gpt(), backend, units=[Block], prefetch=prefetch, mixed_precision=MixedPrecision(HALF, FLOAT))
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in token_batches(3, 2):
            loss_of(model, batch[backend.rank :][:1]).backward()  # type: ignore[no-untyped-call]
            model.prefetch_forward_params()
            optimizer.step()
            optimizer.zero_grad()
        return model.full_state_dict()

    plain, ahead = (run_ranks(2, lambda backend, depth=depth: work(backend, depth)) for depth in (0, 2))  # type: ignore[misc]
    for name, value in plain[0].items():
        assert all(torch.equal(value, state[name]) for state in (plain[1], *ahead))


# --- refusals


@pytest.mark.parametrize(
    ("field", "dtype"),
    [("param_dtype", torch.int8), ("param_dtype", torch.float64), ("reduce_dtype", torch.int32), ("output_dtype", "half")],
)
def test_dtypes_that_make_no_sense(field: str, dtype: Any) -> None:
    with pytest.raises(DtypeError, match=f"MixedPrecision: {field} must be one of torch.float16, .* got "):
        MixedPrecision(**{field: dtype})


def test_parameters_are_not_gathered_wider_than_they_are() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=r"weight is torch.bfloat16, so the wider param_dtype torch.float32 would send more bytes"):
            FSDP(Weighted().bfloat16(), backend, mixed_precision=MixedPrecision(FLOAT))

    run_ranks(1, work)


def test_an_override_gives_the_parameters_own_dtype_or_the_policys() -> None:
    def work(backend: Backend) -> None:
        policy = MixedPrecision(HALF, param_dtype_override_fn=lambda _: torch.float16)
        with pytest.raises(
            UsageError, match=r"param_dtype_override_fn returned torch.float16 for weight: it must return None, param_dtype"
        ):
            FSDP(Weighted(), backend, mixed_precision=policy)

    run_ranks(1, work)


def test_ranks_with_different_policies_are_told_so() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(CollectiveMismatch, match=r"in float32 as bfloat16, .* but rank 1 has .* in float32 as float16, "):
            FSDP(Weighted(), backend, mixed_precision=MixedPrecision([HALF, torch.float16][backend.rank]))

    run_ranks(2, work)


async def test_the_async_model_takes_a_policy() -> None:
    (backend,) = LoopbackBackend.create_group(1)
    async with AsyncFSDP(Weighted(), backend, mixed_precision=MixedPrecision(HALF)) as model:
        assert (await model(torch.tensor(1.0))).dtype == HALF
    await backend.aclose()
