"""When a thread counts as within a model's forward or backward, where a read parameter may be absent; and what a failed pass leaves."""

import threading
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.fsdp.passes import ForwardPass
from shardnet.fsdp.runtime import Runtime
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.readers import TOKENS, Reader, in_its_forward, refused, wrapped

Tensor = torch.Tensor


READER = Reader()


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def interrupt_part(reader: Reader) -> None:
    """Interrupt a call of the inner module, of whose end FSDP does not hear."""
    reader.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        reader(TOKENS)
    reader.between = None


def fail(*_: object) -> NoReturn:
    raise ArithmeticError


def test_another_thread_reads_slices_as_it_does_between_steps() -> None:
    found: list[Tensor] = []

    def work(reader: Reader) -> None:
        asker = threading.Thread(target=lambda: found.append(reader.norm.weight))
        asker.start()
        asker.join()
        assert found[-1] is next(reader.norm.parameters())

    in_its_forward(work, world_size=1)


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
    """They are so at once or, if FSDP cannot know of the interrupt, from the next step on."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

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

        interrupt_part(reader)
        reader(TOKENS).sum().backward()
        with torch.no_grad():
            reader(TOKENS)
        check_at_rest(model)

    run_ranks(1, work)


def test_what_an_interrupted_part_has_gathered_is_not_used_again() -> None:
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


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.load_full_state_dict({name: torch.ones_like(value) for name, value in READER.state_dict().items()}),
        lambda model: model.update_shards(torch.ones(len(model.groups[0].shard) + len(model.groups[1].shard))),
        lambda model: model.clip_grad_norm_(1.0),
    ],
    ids=["a state", "slices", "gradients"],
)
def test_after_an_interrupted_part_come_slices(use: Callable[[FSDP], object]) -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        interrupt_part(reader)
        use(model)
        check_at_rest(model)

    run_ranks(2, work)


def test_summoned_after_an_interrupted_part() -> None:
    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        expected = model(TOKENS)
        interrupt_part(reader)
        with model.summon_full_params():
            assert torch.equal(model(TOKENS), expected)
        check_at_rest(model)

    run_ranks(2, work)


def test_gradients_that_are_taken_within_a_forward_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Runtime] = []
    begin = Runtime._begin_forward

    def counted(runtime: Runtime) -> ForwardPass:
        begun.append(runtime)
        return begin(runtime)

    monkeypatch.setattr(Runtime, "_begin_forward", counted)

    def slope(reader: Reader, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(reader.norm(at).square().sum(), at)
        assert refused(lambda: reader.norm.weight) == ["norm.weight"]
        return x + gradient

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        reader.between = slope
        for count in (1, 2):
            model(TOKENS).square().sum().backward()
            check_at_rest(model)
            assert len(begun) == count

    run_ranks(1, work)


def test_a_model_that_calls_itself() -> None:
    """It does so twice, so that the second call begins after one has ended."""

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
    """torch runs no hooks after an error while anything in the process is compiled."""

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)

        reader.between = fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            with pytest.raises(ArithmeticError):
                model(TOKENS)
        check_at_rest(model)
        reader.between = None
        model(TOKENS).sum().backward()

    run_ranks(1, work)


def test_a_part_of_the_model_alone() -> None:
    """Everything else is absent, but not the part's own parameters; a module that is no unit belongs to the unit around it."""

    def work(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        FSDP(model, backend, units=(nn.Sequential, nn.MultiheadAttention))
        x = torch.ones(3, 2)
        assert model[1](x, x, x)[0].shape == (3, 2)
        model[1].register_forward_pre_hook(lambda _, given: (given[0] + model[0].bias, *given[1:]))
        with pytest.raises(StateError, match=r"^0\.bias is sharded: the parameter is whole only while its unit Sequential runs"):
            model[1](x, x, x)

    run_ranks(2, work)
