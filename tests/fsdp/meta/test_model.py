"""Models built on meta: they are materialised unit by unit, with the values that one process would have, or refused by name."""

import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.config import Timeouts
from shardnet.errors import SizeMismatchError, UsageError
from shardnet.fsdp import FSDP, MixedPrecision, memory_report
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.meta.initial_values import InitialValues
from shardnet.sharding import ShardingStrategy
from tests.devices import TEST_DEVICE
from tests.fsdp.conftest import START_S
from tests.fsdp.meta import worker
from tests.fsdp.models import GPT, Block, _seeding, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
WORLD_SIZE = 3


class Layer(nn.Module):
    """A unit with all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 6)
        self.register_buffer("scale", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("scale").copy_(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x)).relu()) * self.get_buffer("scale").prod()
        return out


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), Layer(), Layer(), nn.Linear(6, 3))


class Tied(nn.Sequential):
    """The head is made with a weight of its own first, and torch's LSTM keeps weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 9, bias=False))
        self[2].weight = self[0].weight


def on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def filled(module: nn.Module, generator: torch.Generator) -> None:
    """A param_init_fn with a generator of its own, because ranks are threads here and share torch's."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3, generator=generator)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(2)


def init_fn(rank: int = 0) -> Callable[[nn.Module], None]:
    return partial(filled, generator=torch.Generator(TEST_DEVICE).manual_seed(5 + rank))


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(value, right[name]) for name, value in left.items())


def units(_: str, module: nn.Module) -> bool:
    return isinstance(module, Layer | nn.LSTM)


@pytest.mark.parametrize("kind", [Model, Tied])
def test_reset_parameters_draws_what_constructors_draw(kind: Callable[[], nn.Module]) -> None:
    def work(backend: Backend) -> None:
        with _seeding, torch.random.fork_rng():
            torch.manual_seed(7)
            whole = kind()
            torch.manual_seed(7)
            inner = on_meta(kind)
            originals = list(inner.parameters())
            model = FSDP(inner, backend, units=units)
        assert equal(model.full_state_dict(), whole.state_dict())
        assert equal(dict(inner.named_buffers()), dict(whole.named_buffers()))
        assert all(mine is original for mine, original in zip(inner.parameters(), originals, strict=True))
        assert equal(model.unwrap().state_dict(), whole.state_dict())

    run_ranks(1, work)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_every_rank_gets_rank_0s_numbers_which_are_those_of_apply(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(on_meta(Model), backend, units=units, strategy=strategy, param_init_fn=init_fn(backend.rank))
        assert equal(model.full_state_dict(), Model().apply(init_fn(0)).state_dict())

    run_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)])
def test_a_run_from_meta_is_the_run_from_memory(precision: MixedPrecision | None) -> None:
    def work(backend: Backend) -> None:
        def state_after_training(model: FSDP) -> dict[str, Tensor]:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in token_batches(3, WORLD_SIZE):
                loss_of(model, batch[backend.rank :][:1]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            return model.full_state_dict()

        wrap = partial(FSDP, backend=backend, units=[Block], mixed_precision=precision)
        materialised = wrap(on_meta(GPT), param_init_fn=init_fn())
        whole = make_gpt()
        whole.load_state_dict(materialised.full_state_dict())
        assert equal(state_after_training(materialised), state_after_training(wrap(whole)))

    run_ranks(WORLD_SIZE, work)


@pytest.mark.parametrize("layers", [2, 8])
def test_no_more_is_whole_than_in_forward(layers: int) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(on_meta(lambda: GPT(layers=layers)), backend, units=[Block], param_init_fn=init_fn())
        root, *blocks = (sum(group.full_bytes for group in unit.groups) for unit in model.units)
        report = memory_report(model)
        assert report.peak_full_parameters == root + max(blocks)
        assert report.full_parameters == 0
        assert report.pooled <= root + max(blocks)
        loss_of(model, token_batches(1, 2)[0]).backward()  # type: ignore[no-untyped-call]

    run_ranks(WORLD_SIZE, work)


def test_an_init_function_may_put_parameters_elsewhere() -> None:
    """Functions written for torch's FSDP do so, because they get modules that are still on meta."""

    def emptied(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for key in list(module._parameters):
            module._parameters[key] = nn.Parameter(torch.full_like(module.get_parameter(key), 3))

    def work(backend: Backend) -> None:
        inner = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        originals = list(inner.parameters())
        model = FSDP(inner, backend, units=[nn.Linear], param_init_fn=emptied)
        assert all(bool((value == 3).all()) for value in model.full_state_dict().values())
        assert all(mine is original for mine, original in zip(inner.parameters(), originals, strict=True))

    run_ranks(2, work)


# --- loading


class OneAtATime(Mapping[str, Tensor]):
    """A file of tensors: each access reads one, and nothing keeps the one before."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._last: Callable[[], Tensor | None] = lambda: None
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        assert self._last() is None, f"the tensor before {name} is still held"
        value = self._state[name].clone()
        self._last = weakref.ref(value)
        self.read.append(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def test_a_state_is_read_by_rank_0_one_tensor_at_a_time() -> None:
    def work(backend: Backend) -> None:
        whole = Model().apply(init_fn())
        state = OneAtATime(whole.state_dict() if backend.rank == 0 else {})
        model = FSDP(on_meta(Model), backend, units=units, initial_state=state)
        assert equal(model.full_state_dict(), whole.state_dict())
        assert sorted(state.read) == (sorted(whole.state_dict()) if backend.rank == 0 else [])
        assert [buffer.tolist() for name, buffer in model.named_buffers() if "scale" in name] == [[2, 3], [2, 3]]

    run_ranks(WORLD_SIZE, work)


def test_a_state_may_have_tied_parameters_under_one_of_their_names() -> None:
    def work(backend: Backend) -> None:
        whole = make_gpt(seed=3)
        state = whole.state_dict()
        del state["tokens.weight"]
        reading = OneAtATime(state)
        model = FSDP(on_meta(GPT), backend, units=[Block], initial_state=reading)
        assert equal(model.full_state_dict(), whole.state_dict())

    run_ranks(2, work)


def test_whole_parameters_can_come_from_an_iterator() -> None:
    def work(backend: Backend) -> None:
        whole = make_gpt(seed=3).state_dict()
        file = OneAtATime(whole)
        model = FSDP(on_meta(GPT), backend, units=[Block], param_init_fn=init_fn())
        model.load_full_state_dict((name, file[name]) for name in file)
        assert equal(model.full_state_dict(), whole)
        model.load_full_state_dict(OneAtATime(whole))

    run_ranks(2, work)


# --- refusals


class Forgetful(Layer):
    def reset_parameters(self) -> None:
        """This leaves `scale` as it is."""


class Recursive(Layer):
    """Initialises what another unit holds."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.up.weight)


class Masked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(7)


def half() -> nn.Module:
    module = Model()
    module[3].to("meta")
    return module


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: on_meta(GPT), {}, r"the wrapped module \(GPT\): holds parameters or buffers on meta but has no reset_parameters"),
        (half, {}, r"3\.weight is on meta but 0\.weight is not"),
        (lambda: on_meta(GPT), {"param_init_fn": lambda module: None}, r"tokens\.weight.* and 32 more: not filled"),
        (lambda: on_meta(Forgetful), {}, "scale: buffers on meta that nothing has filled; reset_parameters"),
        (lambda: on_meta(Masked), {}, "mask: a tensor in a plain attribute"),
        (lambda: on_meta(Recursive), {"units": [nn.Linear]}, "initialisation of Recursive wrote to parameters of another unit"),
        (
            lambda: on_meta(Model),
            {"initial_state": iter([])},
            r"a mapping from names to whole tensors, such as .*open_weights",
        ),
        (lambda: on_meta(Model), {"initial_state": {}}, r"initial_state lacks 0\.weight, .* and 17 more"),
        (make_gpt, {"initial_state": {}}, "this module has memory"),
        (make_gpt, {"device": "cpu"}, "this module has memory"),
    ],
)
def test_what_cannot_be_materialised_is_named(make: Callable[[], nn.Module], arguments: dict[str, object], message: str) -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=message):
            FSDP(make(), backend, **{"units": units, **arguments})  # type: ignore[arg-type]

    run_ranks(1, work)


def test_a_state_that_does_not_fit_is_refused_by_all_ranks() -> None:
    def work(backend: Backend) -> None:
        state = {**Model().state_dict(), "other": torch.zeros(1)} if backend.rank == 0 else {}
        mine = "filling this model with rank 0's initial_state failed" if backend.rank else "initial_state has other, which the model lacks"
        with pytest.raises(UsageError, match=mine):
            FSDP(on_meta(Model), backend, initial_state=state)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("name", "value", "error", "own", "others"),
    [
        (
            "2.up.bias",
            torch.zeros(1),
            SizeMismatchError,
            r"expected \(7,\) as the shape of 2\.up\.bias in initial_state but got \(1,\)",
            "2",
        ),
        ("3.weight", torch.full((3, 6), torch.nan), UsageError, r"3\.weight: not filled by initialisation, or filled with NaN", "Model"),
        ("1.norm.running_var", torch.zeros(2), SizeMismatchError, r"as the shape of 1\.norm\.running_var in initial_state", "the buffers"),
    ],
)
def test_a_tensor_that_does_not_fit_ends_every_rank_at_once(
    name: str, value: Tensor, error: type[UsageError], own: str, others: str
) -> None:
    def work(backend: Backend) -> None:
        state = {**Model().apply(init_fn()).state_dict(), name: value} if backend.rank == 0 else {}
        expected = (error, own) if backend.rank == 0 else (UsageError, f"filling {others} with rank 0's initial_state failed on rank 0")
        with pytest.raises(expected[0], match=expected[1]):
            FSDP(on_meta(Model), backend, units=units, initial_state=state)

    began = time.monotonic()
    run_ranks(WORLD_SIZE, work)
    assert time.monotonic() - began < Timeouts.for_tests().collective_s / 2, "a rank waited for rank 0"


def test_a_state_that_cannot_be_read_ends_every_rank() -> None:
    class Torn(OneAtATime):
        def __getitem__(self, name: str) -> Tensor:
            raise OSError(f"{name} is damaged")

    def work(backend: Backend) -> None:
        state = Torn(Model().state_dict() if backend.rank == 0 else {})
        with pytest.raises(UsageError if backend.rank else OSError, match="failed on rank 0" if backend.rank else "is damaged"):
            FSDP(on_meta(Model), backend, initial_state=state)

    run_ranks(2, work)


def test_any_rank_that_fails_while_others_take_part_is_named() -> None:
    """Rank 0 reads the state; another rank may lack memory for what it gets."""

    def take(backend: Backend, comms: Communicators) -> None:
        with InitialValues(None, {}, backend.rank).agreed("the buffers", comms):
            if backend.rank == 1:
                raise MemoryError("none left")

    def work(backend: Backend) -> None:
        comms = FSDP(nn.Linear(2, 2), backend)._comms
        error, words = (MemoryError, "none left") if backend.rank == 1 else (UsageError, "failed on rank 1; the error there says why")
        with pytest.raises(error, match=words):
            take(backend, comms)

    run_ranks(3, work)


# --- memory of a process


@pytest.mark.timeout(2 * START_S)
def test_the_process_never_holds_more_than_shards_and_a_unit_per_rank() -> None:
    command = [sys.executable, "-m", "tests.fsdp.meta.worker"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    grown, models = map(int, done.stdout.split())
    assert models == worker.WORLD_SIZE
    # the shards of all ranks are one model; besides them a rank may have a unit, a copy of it on the way, and one in the pool
    assert 0.9 * worker.MODEL_BYTES <= grown <= worker.MODEL_BYTES + worker.WORLD_SIZE * 4 * worker.UNIT_BYTES
