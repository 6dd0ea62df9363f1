"""Parameters stay the same objects, and changes made to them from outside count."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import SizeMismatchError
from shardnet.fsdp import FSDP
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_gradients
from tests.fsdp.ranks import run_ranks


def test_parameter_objects_stay_the_same() -> None:
    def work(backend: Backend) -> None:
        inner = make_gpt()
        originals = dict(inner.named_parameters())
        model = FSDP(inner, backend, units=[Block])
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in token_batches(2, 2):
            loss = loss_of(model, batch)
            assert all(parameter is originals[name] for name, parameter in model.named_parameters())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert all(parameter is originals[name] for name, parameter in model.named_parameters())
        assert list(originals) == [name for name, _ in model.named_parameters()]
        assert all(parameter.requires_grad and parameter.is_leaf for parameter in originals.values())
        assert inner.head.weight is inner.tokens.weight

    run_ranks(2, work)


def test_parameters_and_buffers_are_found_by_the_names_that_the_model_lists() -> None:
    class Named(nn.Module):
        """Has a module with the name that FSDP gives the whole."""

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.BatchNorm1d(3)

    def work(backend: Backend) -> None:
        for inner in (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), Named()):
            model = FSDP(inner, backend)
            for name, parameter in model.named_parameters():
                assert model.get_parameter(name) is parameter
            for name, buffer in model.named_buffers():
                assert model.get_buffer(name) is buffer

    run_ranks(2, work)


def test_modules_compute_with_whole_parameters() -> None:
    class Looking(Weighted):
        seen: torch.Size | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.weight.shape
            return super().forward(x)

    def work(backend: Backend) -> None:
        inner = Looking()
        model = FSDP(inner, backend)
        model(torch.tensor(1.0))
        assert inner.seen == (4,)
        assert inner.weight.shape == (2,)

    run_ranks(2, work)


def test_a_shard_whose_data_was_replaced_is_taken_back() -> None:
    """vector_to_parameters, stochastic weight averaging and others replace it."""

    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        (weight,) = model.parameters()
        nn.utils.vector_to_parameters(torch.tensor([5.0, 6.0]), [weight])
        assert model(torch.tensor(1.0)).item() == 22
        weight.data = weight.data * 2
        assert model(torch.tensor(1.0)).item() == 44
        weight.data = torch.zeros(3)
        with pytest.raises(SizeMismatchError, match="this rank's slice of weight"):
            model(torch.tensor(1.0))

    run_ranks(2, work)


def test_changes_in_place_are_seen_by_the_next_forward() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Weighted(), backend)
        with torch.no_grad():
            next(model.parameters()).fill_(backend.rank + 1.0)
        assert model(torch.tensor(1.0)).item() == 6

    run_ranks(2, work)


def test_unwrap_gives_the_module_back() -> None:
    def work(backend: Backend) -> None:
        inner = make_gpt()
        originals = list(inner.parameters())
        model = FSDP(inner, backend, units=[Block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = token_batches(1, 2)[0]
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected = model.full_state_dict()
        held = loss_of(model, batch)  # the root is still gathered for a backward that does not come
        plain = model.unwrap()
        assert plain is inner
        assert all(mine is theirs for mine, theirs in zip(plain.parameters(), originals, strict=True))
        assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
        collectives = sum(counter.count for counter in backend.telemetry.ops.values())
        torch.testing.assert_close(loss_of(plain, batch), held)
        loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]
        assert sum(counter.count for counter in backend.telemetry.ops.values()) == collectives

    run_ranks(2, work)


@pytest.mark.parametrize("before", [True, False], ids=["before sharding", "after it"])
def test_gradient_hooks_get_what_is_reduced(before: bool) -> None:
    """They are called once per backward, and the gradient is what they return."""
    alone = make_gpt(layers=2)
    for parameter in alone.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    batches = token_batches(2, 2)
    for batch in batches:
        loss_of(alone, batch).backward()  # type: ignore[no-untyped-call]

    def work(backend: Backend) -> None:
        module = make_gpt(layers=2)
        calls: list[torch.Tensor] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(gradient)
            return gradient * 3

        if before:
            handles = [parameter.register_hook(hook) for parameter in module.parameters()]  # type: ignore[no-untyped-call]
        model = FSDP(module, backend, units=[Block])
        if not before:
            handles = [parameter.register_hook(hook) for parameter in module.parameters()]  # type: ignore[no-untyped-call]
        for batch in batches:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        check_gradients(model, alone, backend.rank, atol=1e-5)
        assert len(calls) == 2 * len(handles)
        for handle in handles:
            handle.remove()
        loss_of(model, batches[0]).backward()  # type: ignore[no-untyped-call]
        assert len(calls) == 2 * len(handles)

    run_ranks(2, work)


def test_optimizers_may_step_in_hooks_behind_accumulation() -> None:
    batches = token_batches(3, 2)

    def train(model: FSDP, optimizers: Mapping[nn.Parameter, torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        for batch in batches:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        return model.full_state_dict()

    def work(backend: Backend) -> None:
        plain = FSDP(make_gpt(layers=2), backend, units=[Block])
        expected = train(plain, {each: torch.optim.AdamW([each]) for each in plain.parameters()})
        model = FSDP(make_gpt(layers=2), backend, units=[Block])
        optimizers = {each: torch.optim.AdamW([each]) for each in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        stepped = train(model, {})
        assert all(torch.equal(stepped[name], expected[name]) for name in expected)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(2, work)
