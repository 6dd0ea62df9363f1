"""What programs do with an optimizer works with a sharded one, and ends in the same parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import FSDP
from shardnet.zero import ZeroOptimizer
from tests.fsdp.models import Weighted
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import Place, check_alike, make_model


def train(model: nn.Module, place: Place, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        place.loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5}), (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 6})],
)
def test_schedulers(kind: Any, options: dict[str, Any]) -> None:
    """OneCycleLR changes Adam's betas, too."""

    def program(model: nn.Sequential, place: Place) -> list[float]:
        optimizer = place.optimizer(model, model.parameters(), optim.AdamW, lr=0.05)
        scheduler = kind(optimizer, **options)
        rates = []
        for step in range(6):
            train(model, place, optimizer, range(step, step + 1))
            scheduler.step() if step < 5 else None
            rates.append(scheduler.get_last_lr()[0])
        return rates

    check_alike(program)


def test_options_that_are_edited_by_hand() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05, momentum=0.9)
        train(model, place, optimizer, range(2))
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(model, place, optimizer, range(2, 4))

    check_alike(program, 3)


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    def program(model: nn.Sequential, place: Place) -> int:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05)
        calls: list[None] = []

        def closure() -> torch.Tensor:
            calls.append(None)
            optimizer.zero_grad()
            loss = place.loss(model, len(calls))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.no_grad():
            assert [optimizer.step(closure).requires_grad for _ in range(3)] == [True] * 3
        return len(calls)

    check_alike(program)


def test_groups_that_are_added_later() -> None:
    def program(model: nn.Sequential, place: Place) -> int:
        optimizer = place.optimizer(model, model[4].parameters(), optim.AdamW, lr=0.05)
        train(model, place, optimizer, range(2))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        train(model, place, optimizer, range(2, 4))
        optimizer.add_param_group({"params": model[0].weight, "weight_decay": 0.5})
        train(model, place, optimizer, range(4, 6))
        return len(optimizer.param_groups)

    check_alike(program, 3)


def test_parameters_that_are_frozen_later_and_again_trained() -> None:
    """A frozen parameter does not even decay, and its state stands still; one may be frozen from the start."""

    def program(model: nn.Sequential, place: Place) -> None:
        model[0].weight.requires_grad_(False)
        optimizer = place.optimizer(model, model.parameters(), optim.AdamW, lr=0.05, weight_decay=0.3)
        train(model, place, optimizer, range(2))
        optimizer.zero_grad()
        model[2].requires_grad_(False)
        model[4].bias.requires_grad_(False)
        train(model, place, optimizer, range(2, 4))
        model.requires_grad_(True)
        train(model, place, optimizer, range(4, 6))

    check_alike(program, 3)


def test_a_bucket_without_gradients_rests() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, backend, module=model, units=[nn.Linear])
        for parameter in model[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        ops = backend.telemetry.ops
        before = {op: ops[op].count for op in ops}
        optimizer.step()
        optimizer.wait()
        grown = {op: ops[op].count - before.get(op, 0) for op in ops}
        assert {op: count for op, count in grown.items() if count} == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}
        optimizer.zero_grad()
        optimizer.step()  # no rank has a gradient: the ranks only ask each other
        assert ops["reduce_scatter"].count == before.get("reduce_scatter", 0) + 1

    run_ranks(2, work)


def test_a_gradient_on_some_ranks_counts_as_zeros_on_the_others() -> None:
    def work(backend: Backend) -> list[float]:
        weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        optimizer = ZeroOptimizer([weight], optim.SGD, backend, lr=1.0)
        if backend.rank == 1:
            weight.grad = torch.tensor([2.0, 4.0, 6.0])
        optimizer.step()
        return weight.tolist()

    assert run_ranks(2, work) == [[0.0, 0.0, 0.0]] * 2


def test_accumulated_gradients_are_reduced_once() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05, momentum=0.9)
        for step in range(0, 6, 3):
            for micro in range(3):
                (place.loss(model, step + micro) / 3).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    check_alike(program, 3)


def test_gradients_that_are_zeroed_rather_than_dropped() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.AdamW, lr=0.05)
        train(model, place, optimizer, range(1))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    check_alike(program)


def test_gradients_that_are_averaged_already() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.AdamW, lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            place.loss(model, step).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                if place.backend is not None:
                    assert parameter.grad is not None
                    parameter.grad /= place.backend.world_size
                    parameter.grad = place.backend.all_reduce(parameter.grad).wait()
            optimizer.step()

    check_alike(program, 2, reduce_gradients=False)


def test_parameters_keep_their_identity_and_gradients_are_left_alone() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        parameters = dict(model.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        optimizer = ZeroOptimizer(model.named_parameters(), optim.AdamW, backend)
        Place(backend).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        gradients = {name: copy.copy(parameter.grad) for name, parameter in parameters.items()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert parameter.shape == shapes[name]
            assert parameter.is_contiguous()
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradients[name])  # type: ignore[arg-type]
        assert optimizer.param_groups[0]["param_names"] == list(parameters)
        assert optimizer.param_groups[0]["params"][0] is parameters["0.weight"]

    run_ranks(2, work)


def test_rank_0s_parameters_and_buffers_reach_every_rank() -> None:
    """If the module is given, those that are not optimized are sent as well."""

    def work(backend: Backend) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(backend.rank + 1)
        ZeroOptimizer(model[0].parameters(), optim.SGD, backend, module=model)
        return {name: tensor.unique().tolist() for name, tensor in model.state_dict().items()}

    for state in run_ranks(2, work):
        assert all(values == [1] for values in state.values()), state


def test_parameters_that_were_moved_to_other_memory_are_brought_back() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05)
        train(model, place, optimizer, range(2))
        if place.backend is not None:
            optimizer.wait()
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        train(model, place, optimizer, range(2, 4))

    check_alike(program)


def test_loading_the_module_between_steps_counts() -> None:
    def program(model: nn.Sequential, place: Place) -> None:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05)
        train(model, place, optimizer, range(2))
        model.load_state_dict(make_model().state_dict())
        train(model, place, optimizer, range(2, 4))

    check_alike(program)


def test_sixteen_bit_parameters_and_several_dtypes() -> None:
    def work(backend: Backend) -> list[list[float]]:
        parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
        optimizer = ZeroOptimizer(parameters, optim.SGD, backend, lr=0.5)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, backend.rank)
        optimizer.step()
        return [parameter.tolist() for parameter in parameters]

    assert run_ranks(2, work) == [[[0.75] * 3] * 3] * 2


def test_sparse_gradients_become_dense() -> None:
    def work(backend: Backend) -> list[float]:
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = ZeroOptimizer(table.parameters(), optim.SGD, backend, lr=1.0)
        before = table.weight.detach().clone()
        table(torch.tensor([backend.rank])).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        optimizer.step()
        return (table.weight - before).flatten().tolist()

    for change in run_ranks(2, work):
        assert change == pytest.approx([-0.5] * 4 + [0.0] * 4)


def test_backward_through_parameters_that_a_step_has_changed_is_refused_as_ever() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, lr=0.1)
        loss = Place(backend).loss(model, 0)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, work)


def test_options_that_differ_over_ranks_are_refused_on_all() -> None:
    """For example after ReduceLROnPlateau with each rank's own loss. The refused step changes no parameter."""

    def work(backend: Backend) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = ZeroOptimizer([weight], optim.SGD, backend, lr=0.5)
        weight.grad = torch.ones(3)
        optimizer.param_groups[0]["lr"] = 0.5 + backend.rank
        with pytest.raises(StateError, match=r"lr of group 0 is 0.5 on one rank and 1.5 on another"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        assert weight.tolist() == [0.5] * 3

    run_ranks(2, work)


def test_a_gradient_on_some_ranks_cannot_have_been_averaged() -> None:
    def work(backend: Backend) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = ZeroOptimizer([("w", weight)], optim.SGD, backend, reduce_gradients=False)
        weight.grad = torch.ones(3) if backend.rank else None
        with pytest.raises(StateError, match="w has a gradient on some ranks only"):
            optimizer.step()

    run_ranks(2, work)


def test_a_step_within_a_step_is_refused() -> None:
    def work(backend: Backend) -> None:
        optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, backend)
        with pytest.raises(StateError, match="called within a step"):
            optimizer.step(optimizer.step)
        optimizer.step()

    run_ranks(2, work)


def test_parameters_of_fsdp_are_refused() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        with pytest.raises(UsageError, match="sharded already, by FSDP in Weighted"):
            ZeroOptimizer(model.parameters(), optim.SGD, backend)

    run_ranks(2, work)


def test_a_converted_module_is_refused() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, module=model)
        model.double()
        with pytest.raises(UsageError, match=r"0.weight became torch.float64 \[7, 5\] on cpu, and was torch.float32"):
            optimizer.step()

    run_ranks(1, work)


def test_copies_are_refused() -> None:
    def work(backend: Backend) -> None:
        optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, backend)
        with pytest.raises(StateError, match="consolidated_state_dict"):
            copy.deepcopy(optimizer)

    run_ranks(1, work)


def test_hooks_of_the_optimizer_run() -> None:
    def work(backend: Backend) -> list[str]:
        optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, backend)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.step()
        return seen

    assert run_ranks(2, work) == [["before", "after"]] * 2
