"""A model reads parameters outside of their unit's forward, where they are sharded: refused, whatever the model does with them."""

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.fsdp.state import with_slices
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.readers import TOKENS, Reader, Reading, in_its_forward, wrapped

Tensor = torch.Tensor
READINGS: dict[str, tuple[str, Reading]] = {
    "tied": ("embedding.weight", lambda reader, x: F.linear(x, reader.embedding.weight)),
    "a product that a slice has, too": (
        "embedding.weight",
        lambda reader, x: x + (reader.embedding.weight @ reader.embedding.weight.T).sum(),
    ),
    "one element, which fits everywhere": ("norm.weight", lambda reader, x: x * reader.norm.weight),
    "a copy": ("norm.weight", lambda reader, x: x * reader.norm.weight.detach().clone()),
    "among others": ("norm.weight", lambda reader, x: torch.cat([x.flatten(), reader.norm.weight])),
    "changed": ("norm.weight", lambda reader, x: reader.norm.weight.data.mul_(2) + x),
}


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("reading", list(READINGS))
def test_what_is_read_outside_of_its_unit_is_refused(reading: str, place: str) -> None:
    name, read = READINGS[reading]

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        originals = list(model.parameters())
        setattr(reader, place, read)
        unit = name.partition(".")[0]
        with pytest.raises(StateError, match=f"^{name} is sharded: the parameter is whole only while its unit {unit} runs"):
            model(TOKENS)
        check_at_rest(model)
        setattr(reader, place, None)
        assert all(one is other for one, other in zip(model.parameters(), originals, strict=True))
        model(TOKENS).sum().backward()
        assert all(parameter.grad is not None for parameter in originals)

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_with_every_strategy(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend, strategy, 2 if strategy is ShardingStrategy.HYBRID_SHARD else None)
        reader.after = lambda reader, x: F.linear(x, reader.embedding.weight)
        for _ in range(2):
            with pytest.raises(StateError, match=r"^embedding\.weight is sharded: the parameter is whole only"):
                model(TOKENS)
        check_at_rest(model)

    run_ranks(2, work)


def test_what_a_parameter_is_like_may_be_asked_anywhere() -> None:
    seen = []

    def ask(reader: Reader, x: Tensor) -> Tensor:
        weight = reader.embedding.weight
        seen.append((weight.shape, weight.dtype, weight.device, weight.numel(), weight.dim(), weight.requires_grad, repr(weight)))
        assert isinstance(weight, nn.Parameter)
        for alike in (
            weight.data,
            weight.detach(),
            torch.zeros_like(weight),
            weight.new_zeros(10, 2),
            torch.empty_like(weight, dtype=weight.dtype),
        ):
            assert (alike.shape, alike.dtype, alike.device) == (weight.shape, weight.dtype, weight.device)
        assert torch.equal(torch.ones_like(weight), torch.ones(10, 2, dtype=torch.float64))
        assert torch.randint_like(weight, 3).shape == weight.new_empty_strided((10, 2), (2, 1)).shape
        assert x.float().type_as(weight).dtype == torch.result_type(x, weight) == torch.float64
        assert torch.ones(2).expand_as(weight).shape == weight.shape
        assert {each.dtype for each in reader.parameters()} == {torch.float64}
        return x.to(weight.device)

    def work(backend: Backend) -> None:
        reader = Reader().double()
        reader.norm.requires_grad_(False)
        model = FSDP(reader, backend, units=(nn.Embedding, nn.LayerNorm))
        device = reader.embedding.weight.device
        reader.before = reader.between = reader.after = ask
        model(TOKENS).sum().backward()
        with torch.inference_mode():
            model(TOKENS)
        what = "<embedding.weight, sharded, torch.float64 (10, 2)>"
        assert set(seen) == {(torch.Size([10, 2]), torch.float64, device, 20, 2, True, what)}

    run_ranks(2, work)


def test_parameters_are_the_originals_in_a_forward_too() -> None:
    """So an optimizer may be made there, and another thread that saves meanwhile gets the right values."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        originals = dict(model.named_parameters())
        before = model.sharded_state_dict().shards
        saved: list[dict[str, Tensor]] = []
        optimizers: list[torch.optim.Optimizer] = []

        def read(reader: Reader, x: Tensor) -> Tensor:
            optimizers.append(torch.optim.SGD(reader.parameters(), lr=1.0))
            saver = threading.Thread(target=lambda: saved.append(model.sharded_state_dict().shards | with_slices(reader.norm)))
            saver.start()
            saver.join()
            assert all(parameter is originals[name] for name, parameter in reader.named_parameters())
            return x

        reader.between = read
        model(TOKENS).square().sum().backward()
        optimizers[0].step()
        assert set(saved[0]) == {*before, "weight"}
        for name, value in before.items():
            assert torch.equal(saved[0][name], value)
        assert not torch.equal(originals["norm.weight"], before["norm.weight"]), "not trained"

    run_ranks(2, work)


def test_what_is_set_is_set_on_the_parameter() -> None:
    def work(reader: Reader) -> None:
        original, weight = next(reader.norm.parameters()), reader.norm.weight
        assert weight is not original
        weight._mark = "seen"  # type: ignore[attr-defined]
        assert original._mark == weight._mark == "seen"  # type: ignore[attr-defined]
        gradient = original.detach().clone()
        weight.grad = gradient
        assert all(each.grad is gradient for each in (weight, original))
        weight.grad = None
        assert all(each.grad is None for each in (weight, original))
        assert weight.requires_grad_(False) is weight
        assert all(each.requires_grad is False for each in (weight, original))
        weight.requires_grad = True
        assert all(each.requires_grad for each in (weight, original))
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            weight.nothing_of_the_kind  # type: ignore[attr-defined]  # noqa: B018

    in_its_forward(work)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: setattr(weight, "data", torch.ones(2)),
        lambda weight: weight.register_hook(print),
        lambda weight: torch.save(weight, io.BytesIO()),
        copy.copy,
        copy.deepcopy,
        list,
        lambda weight: weight.norm().item(),
    ],
)
def test_nothing_is_lost_in_silence(use: Callable[[Tensor], object]) -> None:
    def work(reader: Reader) -> None:
        with pytest.raises(StateError, match=r"^norm\.weight is sharded: the parameter is whole only"):
            use(reader.norm.weight)

    in_its_forward(work, world_size=1)


def test_a_parameter_that_is_put_back_is_the_original() -> None:
    """torch.func.functional_call puts back what it has replaced."""

    def work(reader: Reader) -> None:
        original = next(reader.norm.parameters())
        reader.norm.weight = reader.norm.weight
        assert next(reader.norm.parameters()) is original

    in_its_forward(work)


def test_a_parameter_of_the_programs_own_is_read_as_it_is() -> None:
    def work(reader: Reader) -> None:
        original, own = next(reader.norm.parameters()), nn.Parameter(torch.ones(2))
        reader.norm.weight = own
        assert reader.norm.weight is own
        reader.norm.weight = original

    in_its_forward(work)


def test_one_that_is_kept_in_another_module_is_the_original() -> None:
    """The root has no parameters of its own."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

        def keep(reader: Reader, x: Tensor) -> Tensor:
            reader.last = reader.norm.weight
            return x

        reader.before = keep
        model(TOKENS)
        assert reader.last is next(reader.norm.parameters())
        assert model.full_state_dict().keys() == {"last", "embedding.weight", "norm.weight"}

    run_ranks(2, work)


@pytest.mark.parametrize("save", [pickle.dumps, lambda module: torch.save(module, io.BytesIO())])
def test_modules_with_slices_are_not_pickled(save: Callable[[nn.Module], object]) -> None:
    """Hooks are local functions, which pickle would complain about; and an inner module has none, so its slices would be saved."""

    def work(backend: Backend) -> None:
        module = nn.ModuleDict({"unit": nn.Sequential(nn.Linear(2, 2)), "ignored": nn.Linear(2, 2)})
        model = FSDP(module, backend, units=[nn.Sequential], ignored_modules=[module["ignored"]])
        unit = module["unit"]
        assert isinstance(unit, nn.Sequential)
        for part in (module, unit, unit[0]):
            with pytest.raises(StateError, match=r"cannot be pickled.*: save the full_state_dict\(\)"):
                save(part)
        save(module["ignored"])
        save(model.unwrap())

    run_ranks(2, work)


def test_copies_and_unwrapped_modules_hold_plain_dicts() -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        other = copy.deepcopy(reader.norm)
        assert type(other._parameters) is dict
        assert torch.equal(other.weight, reader.norm.weight)
        model.unwrap()
        assert all(type(module._parameters) is dict for module in reader.modules())
        reader.after = lambda reader, x: F.linear(x, reader.embedding.weight)
        assert reader(TOKENS).shape == (2, 3, 10)

    run_ranks(2, work)
