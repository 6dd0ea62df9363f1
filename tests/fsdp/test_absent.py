"""Parameters that a model reads outside of their unit's forward, where they are sharded: refused, whatever would have come of it."""

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.fsdp.state import with_slices
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
Reading = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    """Does something with its parts' parameters before, between and after their forwards, and on another one's behalf."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)
        self.norm = nn.LayerNorm(2, bias=False)
        self.before: Reading | None = None
        self.between: Reading | None = None
        self.after: Reading | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._read(self.before, x)
        out: Tensor = self._read(self.between, self.embedding(x))
        return self._read(self.after, self.norm(out))

    def _read(self, reading: Reading | None, x: Tensor) -> Tensor:
        return x if reading is None else reading(self, x)


def wrapped(backend: Backend, **options: object) -> tuple[Reader, FSDP]:
    reader = Reader()
    return reader, FSDP(reader, backend, units=(nn.Embedding, nn.LayerNorm), **options)  # type: ignore[arg-type]


TOKENS = torch.arange(6).reshape(2, 3)
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
        with pytest.raises(StateError, match=f"^{name} is sharded here: it is whole only while its unit {unit} runs"):
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
        size = {"intra_node_size": 2} if strategy is ShardingStrategy.HYBRID_SHARD else {}
        reader, model = wrapped(backend, strategy=strategy, **size)
        reader.after = lambda reader, x: F.linear(x, reader.embedding.weight)
        for _ in range(2):
            with pytest.raises(StateError, match=r"^embedding\.weight is sharded here"):
                model(TOKENS)
        check_at_rest(model)

    run_ranks(2, work)


def in_its_forward(work: Callable[[Reader], object], *, world_size: int = 2, whole: bool = True) -> None:
    """Call `work` on all ranks within a forward, and go on with it: a step of what is trained then reaches every parameter.

    whole  of the model; or of the module inside
    """

    def read(reader: Reader, x: Tensor) -> Tensor:
        work(reader)
        return x

    def rank(backend: Backend) -> None:
        reader, model = wrapped(backend)
        originals = list(model.parameters())
        reader.between = read
        (model if whole else reader)(TOKENS).sum().backward()
        check_at_rest(model)
        assert all(one is other and one.grad is not None for one, other in zip(model.parameters(), originals, strict=True))

    run_ranks(world_size, rank)


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
    """So an optimizer may be made there, and what another thread saves meanwhile is right."""

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


def test_another_thread_reads_slices_as_it_does_between_steps() -> None:
    found: list[Tensor] = []

    def work(reader: Reader) -> None:
        asker = threading.Thread(target=lambda: found.append(reader.norm.weight))
        asker.start()
        asker.join()
        assert found[-1] is next(reader.norm.parameters())

    in_its_forward(work, world_size=1)


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
        with pytest.raises(StateError, match=r"^norm\.weight is sharded here"):
            use(reader.norm.weight)

    in_its_forward(work, world_size=1)


def test_a_parameter_that_is_put_back_is_the_original() -> None:
    """As torch.func.functional_call does with what it has replaced."""

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


def refused(read: Callable[[], Tensor]) -> list[str]:
    """What is said of one; [] if it is not refused."""
    try:
        read().sum()
    except StateError as error:
        return [str(error).split()[0]]
    return []


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_backward_reads_what_forward_has_read(reentrant: bool) -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        seen: list[tuple[torch.Size, list[str]]] = []

        def part(x: Tensor) -> Tensor:
            seen.append((reader.embedding.weight.shape, refused(lambda: reader.embedding.weight)))
            out: Tensor = reader.norm(x)
            return out * len(reader.embedding.weight)

        reader.between = lambda reader, x: checkpoint(part, x, use_reentrant=reentrant)
        loss = model(TOKENS).sum()
        forward, *_ = seen
        assert forward == (torch.Size([10, 2]), ["embedding.weight"])
        loss.backward()
        shapes = {shape for shape, _ in seen[1:]}
        assert len(seen) == 2
        assert shapes == {torch.Size([10, 2])}

    run_ranks(2, work)


def test_hooks_around_the_whole_model_are_in_its_forward() -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        seen: list[list[str]] = []
        note = lambda *_: seen.append(refused(lambda: reader.norm.weight))  # noqa: E731
        reader.register_forward_pre_hook(note, prepend=True)
        reader.register_forward_hook(note)
        model(TOKENS)
        assert seen == [["norm.weight"]] * 2

    run_ranks(1, work)


@pytest.mark.parametrize("whole", [True, False])
def test_a_thread_that_runs_a_part_takes_nothing_from_the_one_that_waits_for_it(whole: bool) -> None:
    seen: list[list[str]] = []

    def work(reader: Reader) -> None:
        def run() -> None:
            seen.append(refused(lambda: reader.embedding.weight))
            reader.norm(torch.ones(1, 2))

        reader.norm.register_forward_pre_hook(lambda *_: seen.append(refused(lambda: reader.embedding.weight)))
        helper = threading.Thread(target=run)
        helper.start()
        helper.join()
        seen.append(refused(lambda: reader.norm.weight))

    in_its_forward(work, world_size=1, whole=whole)
    assert seen[:3] == [[], ["embedding.weight"], ["norm.weight"]]


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "the module inside"])
def test_after_a_forward_that_was_interrupted_attributes_are_slices(whole: bool) -> None:
    """At once, or where FSDP cannot know of it, from the next step on."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

        def interrupt(reader: Reader, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

        reader.between = interrupt
        with pytest.raises(KeyboardInterrupt):
            (model if whole else reader)(TOKENS)
        if whole:
            check_at_rest(model)
        reader.between = None
        for called in (reader, model):
            called(TOKENS).sum().backward()
            check_at_rest(model)

    run_ranks(1, work)


def test_parts_alone_recover_from_an_interrupted_one() -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

        def interrupt(reader: Reader, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

        reader.between = interrupt
        with pytest.raises(KeyboardInterrupt):
            reader(TOKENS)
        reader.between = None
        reader(TOKENS).sum().backward()
        with torch.no_grad():
            reader(TOKENS)
        check_at_rest(model)

    run_ranks(1, work)


def test_what_an_interrupted_part_has_gathered_is_not_used_again() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        weights = list(model.parameters())[-1]
        before = model(TOKENS)
        hook = reader.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            reader(TOKENS)
        hook.remove()
        with torch.no_grad():
            weights.mul_(3)
        torch.testing.assert_close(model(TOKENS), 3 * before)

    run_ranks(2, work)


def test_a_model_that_calls_itself() -> None:
    """Twice, so that the second call is begun when one has ended."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        seen: list[list[str]] = []

        def again(reader: Reader, x: Tensor) -> Tensor:
            reader.between = None
            for _ in range(2):
                x = x + model(TOKENS)
                seen.append(refused(lambda: reader.norm.weight))
            return x

        reader.between = again
        model(TOKENS).square().sum().backward()
        check_at_rest(model)
        assert seen == [["norm.weight"]] * 2
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_ranks(2, work)


def test_an_error_that_no_hook_hears_of_leaves_nothing_gathered() -> None:
    """torch runs none after an error while anything in the process is compiled."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

        def fail(reader: Reader, x: Tensor) -> Tensor:
            raise ArithmeticError

        reader.between = fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            with pytest.raises(ArithmeticError):
                model(TOKENS)
        check_at_rest(model)
        reader.between = None
        model(TOKENS).sum().backward()

    run_ranks(1, work)


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


def test_a_part_of_the_model_alone() -> None:
    """All else is absent, the part's own parameters are not, and a module that is no unit belongs to the one around it."""

    def work(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        FSDP(model, backend, units=(nn.Sequential, nn.MultiheadAttention))
        x = torch.ones(3, 2)
        assert model[1](x, x, x)[0].shape == (3, 2)
        model[1].register_forward_pre_hook(lambda _, given: (given[0] + model[0].bias, *given[1:]))
        with pytest.raises(StateError, match=r"^0\.bias is sharded here: it is whole only while its unit Sequential runs"):
            model[1](x, x, x)

    run_ranks(2, work)
