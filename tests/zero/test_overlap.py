"""New parameters arrive while the next forward computes; only code that needs them waits."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.fsdp.placement import UnitChoice
from shardnet.zero import ZeroOptimizer
from shardnet.zero.bucket import Bucket, BucketState
from shardnet.zero.gathers import AwaitedParameters
from tests.forked_child import in_a_child
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import WIDTH, Place, make_model


def prepare(model: nn.Sequential, backend: Backend, units: UnitChoice = (nn.Linear,)) -> ZeroOptimizer:
    """An optimizer whose units are the model's three linear layers, and gradients."""
    optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=units, lr=0.1)
    Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
    return optimizer


def hold_back_last(optimizer: ZeroOptimizer, gate: threading.Event) -> None:
    """Let this rank send the last unit's parameters only once the gate is open."""
    _, bucket = optimizer._sharded.buckets[-1]
    start = bucket.start_gather

    def start_late(on_end: Callable[[], None]) -> None:
        def wait_and_start() -> None:
            if gate.wait(10):  # otherwise the others' gather times out, and the test fails
                start(on_end)

        threading.Thread(target=wait_and_start).start()

    bucket.start_gather = start_late  # type: ignore[method-assign]


def open_when_waited_for(optimizer: ZeroOptimizer, gate: threading.Event) -> None:
    """Open the gate once this rank waits for a unit."""
    wait_for = optimizer._gathers.wait_for

    def open_and_wait(unit: int | None) -> None:
        if unit is not None:
            gate.set()
        wait_for(unit)

    optimizer._gathers.wait_for = open_and_wait  # type: ignore[method-assign]


def states(optimizer: ZeroOptimizer) -> list[BucketState]:
    return [bucket.state for _, bucket in optimizer._sharded.buckets]


def test_a_units_forward_waits_for_its_own_parameters_alone() -> None:
    """The last unit's parameters are sent only once the first unit has computed: if that waited for them too, neither would ever happen."""
    gate = threading.Event()
    seen: list[BucketState] = []

    def work(backend: Backend) -> torch.Tensor:
        model = make_model()
        optimizer = prepare(model, backend)
        if backend.rank == 1:
            hold_back_last(optimizer, gate)
        optimizer.step()
        if backend.rank == 0:
            assert states(optimizer)[2] is BucketState.GATHERING

            def computed(*_: object) -> None:
                seen.extend(states(optimizer))
                gate.set()

            model[0].register_forward_hook(computed)
        result: torch.Tensor = model(torch.ones(1, WIDTH)).detach()
        assert states(optimizer) == [BucketState.COMPLETE] * 3
        return result

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert seen[0] is BucketState.COMPLETE
    assert seen[2] is BucketState.GATHERING


def test_a_part_that_is_called_by_itself_waits() -> None:
    """For example if a model generates text without its own forward. The part's parameters belong to the outermost unit."""
    gate = threading.Event()

    def work(backend: Backend) -> torch.Tensor:
        model = make_model()
        optimizer = prepare(model, backend, units=None)
        if backend.rank == 1:
            hold_back_last(optimizer, gate)
        else:
            open_when_waited_for(optimizer, gate)
        optimizer.step()
        result: torch.Tensor = model[4](torch.ones(1, 7)).detach()
        assert states(optimizer) == [BucketState.COMPLETE]
        return result

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: [each.detach().clone() for each in model.parameters()],
        lambda model: [each.detach().clone() for _, each in model.named_parameters()],
        lambda model: [copy.deepcopy(model)[4].weight.detach()],
        lambda model: [model[4].weight.detach().clone()],
        lambda model: [optim.swa_utils.AveragedModel(model).get_parameter("module.4.weight").detach()],
    ],
)
def test_whoever_takes_a_parameter_from_the_module_waits(read: Callable[[nn.Sequential], list[torch.Tensor]]) -> None:
    """For example to average weights after each step."""
    gate = threading.Event()

    def work(backend: Backend) -> list[torch.Tensor]:
        model = make_model()
        optimizer = prepare(model, backend)
        if backend.rank == 1:
            hold_back_last(optimizer, gate)
        else:
            open_when_waited_for(optimizer, gate)
        optimizer.step()
        found = read(model)
        optimizer.wait()
        return found

    first, second = run_ranks(2, work)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[-1], list(make_model().parameters())[-1 if len(first) > 1 else -2])


def test_other_threads_may_read_them_while_it_trains() -> None:
    """They come while a gather is under way, which is no failed gather."""

    def work(backend: Backend) -> torch.Tensor:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model, units=(nn.Linear,), lr=0.1)
        over = threading.Event()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                while not over.is_set():
                    for parameter in model.parameters():
                        parameter.sum().item()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for step in range(30):
                Place(backend).loss(model, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        finally:
            over.set()
            for reader in readers:
                reader.join()
        assert errors == []
        optimizer.wait()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)


def test_a_forked_child_does_not_wait_for_what_only_its_parent_gathers() -> None:
    """A worker of a DataLoader may be forked between a step and the next forward, and read the module, but nothing arrives there."""
    gate = threading.Event()

    def work(backend: Backend) -> list[str]:
        model = make_model()
        optimizer = prepare(model, backend)
        if backend.rank == 1:
            hold_back_last(optimizer, gate)
        optimizer.step()
        outcomes = []
        if backend.rank == 0:
            model[0](torch.ones(1, WIDTH))  # waits here, as the forward does
            with optimizer._gathers._lock:
                outcomes = [in_a_child(partial(lambda layer: layer.weight.shape, model[place])) for place in (0, 4)]
            gate.set()
        optimizer.wait()
        return outcomes

    assert run_ranks(2, work) == [["torch.Size([7, 5])", "InheritedError"], []]


def test_a_copy_of_the_module_waits_for_nothing() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        prepare(model, backend)
        copied = copy.deepcopy(model)
        assert {type(part._parameters) for part in copied.modules()} == {dict}
        assert isinstance(model[4]._parameters, AwaitedParameters)

    run_ranks(1, work)


def test_two_optimizers_of_one_module_are_both_waited_for() -> None:
    gate = threading.Event()

    def work(backend: Backend) -> torch.Tensor:
        model = make_model()
        first = ZeroOptimizer(model[4].parameters(), optim.SGD, backend, module=model, units=(nn.Linear,), lr=0.1)
        second = ZeroOptimizer(
            [*model[0].parameters(), *model[2].parameters()], optim.SGD, backend, module=model, units=(nn.Linear,), lr=0.1
        )
        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        if backend.rank == 1:
            hold_back_last(first, gate)
        else:
            open_when_waited_for(first, gate)
        first.step()
        second.step()
        last = model.get_parameter("4.weight").detach().clone()
        first.wait()
        second.wait()
        return last

    one, other = run_ranks(2, work)
    assert torch.equal(one, other)


def test_saving_the_module_waits_even_where_the_optimizer_is_gone() -> None:
    gate = threading.Event()

    def work(backend: Backend) -> dict[str, torch.Tensor]:
        model = make_model()
        model.register_state_dict_pre_hook(lambda *_: gate.set())  # type: ignore[no-untyped-call] # runs before the hook that waits
        optimizer = prepare(model, backend)
        if backend.rank == 1:
            hold_back_last(optimizer, gate)
        optimizer.step()
        del optimizer
        gc.collect()
        return {name: value.clone() for name, value in model.state_dict().items()}

    first, second = run_ranks(2, work)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(value, make_model().state_dict()[name]) for name, value in first.items())


def test_a_second_step_waits_for_what_nobody_has_used() -> None:
    def work(backend: Backend) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = prepare(model, backend)
        for _ in range(3):
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone = make_model()
    plain = optim.SGD(alone.parameters(), lr=0.1)
    Place().loss(alone, 0).backward()  # type: ignore[no-untyped-call]
    for _ in range(3):
        plain.step()
    for state in run_ranks(2, work):
        torch.testing.assert_close(state, dict(alone.state_dict()), rtol=0, atol=1e-6)


def test_without_a_module_a_step_waits() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend)
        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert states(optimizer) == [BucketState.COMPLETE]

    run_ranks(2, work)


def test_parameters_outside_the_module_are_there_after_the_step() -> None:
    def work(backend: Backend) -> list[float]:
        model, extra = make_model(), nn.Parameter(torch.ones(5))
        optimizer = ZeroOptimizer([*model.parameters(), extra], optim.SGD, backend, module=model, lr=1.0)
        extra.grad = torch.ones(5)
        optimizer.step()
        return extra.tolist()

    assert run_ranks(2, work) == [[0.0] * 5] * 2


def test_a_former_optimizer_keeps_no_memory() -> None:
    """Its hooks stay on the module, and hold nothing."""
    models = [make_model() for _ in range(2)]

    def work(backend: Backend) -> list[weakref.ref[Bucket]]:
        model = models[backend.rank]
        optimizer = prepare(model, backend)
        optimizer.step()
        optimizer.wait()
        former = [weakref.ref(bucket) for _, bucket in optimizer._sharded.buckets]
        del optimizer
        _ = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model)
        return former

    former = [reference for references in run_ranks(2, work) for reference in references]
    gc.collect()
    assert [reference() for reference in former] == [None] * 6
