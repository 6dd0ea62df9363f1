"""Parameters in any place, used or not, frozen or not: gradients equal those of one process."""

from typing import Any

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_against_one_process, check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, seeded, square_loss, stack_of

Tensor = torch.Tensor


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_plain(world_size: int, prefetch: int) -> None:
    check_against_one_process(world_size, seeded(Stack), square_loss, units=[Layer], prefetch=prefetch)


def test_nested_units() -> None:
    check_against_one_process(2, seeded(Stack), square_loss, units=[Layer, nn.Linear])


def test_a_gpt_with_a_tied_head() -> None:
    batches = token_batches(1, 6)[0]
    check_against_one_process(3, make_gpt, lambda model, rank: loss_of(model, batches[2 * rank :][:2]), units=[Block])


def test_parameters_tied_across_units_belong_to_the_unit_around_both() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layer(2).linear.weight = self.layer(0).linear.weight

    def work(backend: Backend) -> None:
        model = FSDP(Tied(), backend, units=[Layer])
        root = model.units[0]
        assert "layers.0.linear.weight" in [placed.name for group in root.groups for placed in group.placed]
        assert len(list(model.parameters())) == len(list(Tied().parameters()))

    run_ranks(1, work)
    check_against_one_process(2, seeded(Tied), square_loss, units=[Layer])


def test_one_module_in_two_places() -> None:
    class Shared(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = self.layers[0]

    check_against_one_process(2, seeded(Shared), square_loss, units=[Layer])


def test_frozen_parameters_inside_a_unit_and_a_frozen_unit() -> None:
    class Frozen(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].requires_grad_(False)
            self.layer(2).linear.weight.requires_grad_(False)

    check_against_one_process(2, seeded(Frozen), square_loss, units=[Layer])


def test_frozen_weights_are_there_when_the_trainable_ones_of_their_unit_are_done() -> None:
    """The root's head has its gradients long before backward comes to the root's frozen bridge."""

    class Bridged(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.bridge = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x) * self.bridge
            out: Tensor = self.head(self.layers[2](self.layers[1](x)))
            return out

    check_against_one_process(2, seeded(Bridged), square_loss, units=[Layer])


def test_a_frozen_first_unit_gets_no_backward() -> None:
    class FrozenFirst(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)

    check_against_one_process(2, seeded(FrozenFirst), square_loss, units=[Layer])


def test_freezing_after_wrapping() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        for frozen in (True, False):
            inner = stack_of(model).layer(1)
            inner.requires_grad_(not frozen)
            model.zero_grad()
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
            assert all((parameter.grad is None) is frozen for parameter in inner.parameters())

    run_ranks(2, work)


def test_freezing_between_forward_and_backward() -> None:
    """For example a discriminator is frozen for the generator's backward. In one process the gradients are dropped as well then."""

    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        inner, outer = stack_of(model).layer(1), stack_of(model).layer(0)
        loss = square_loss(model, backend.rank)
        inner.requires_grad_(False)
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(parameter.grad is None for parameter in inner.parameters())
        assert all(parameter.grad is not None for parameter in outer.parameters())
        check_at_rest(model)
        loss = square_loss(model, backend.rank)
        inner.requires_grad_(True)
        loss.backward()  # type: ignore[no-untyped-call]
        assert not any(parameter.grad.any() for parameter in inner.parameters() if parameter.grad is not None)
        check_at_rest(model)

    run_ranks(2, work)


def test_parameters_unused_everywhere_get_zeros() -> None:
    class Unused(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].register_parameter("spare", nn.Parameter(torch.ones(7)))
            self.register_parameter("spare", nn.Parameter(torch.ones(3)))

    check_against_one_process(2, seeded(Unused), square_loss, units=[Layer])


class ExtraLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.use_extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.extra if self.use_extra else x


def test_a_parameter_used_on_some_ranks_only() -> None:
    """Units complete at different moments on different ranks; the reductions must still pair up."""

    class Uneven(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ExtraLayer() for _ in range(3))

    def uneven_loss(model: nn.Module, rank: int) -> Tensor:
        for module in model.modules():
            if isinstance(module, ExtraLayer):
                module.use_extra = rank == 0
        return square_loss(model, rank)

    class UnevenWithSkip(Uneven):
        """Layer 2's input is also layer 1's, so if layer 2 has an unused parameter it is known to be done only after layer 1."""

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            out: Tensor = self.head(self.layers[1](x) + self.layers[2](x))
            return out

    check_against_one_process(3, seeded(Uneven), uneven_loss, units=[Layer], prefetch=0)
    check_against_one_process(2, seeded(Uneven), uneven_loss, units=[Layer], prefetch=2)
    check_against_one_process(2, seeded(UnevenWithSkip), uneven_loss, units=[Layer])


def test_several_dtypes_in_a_unit() -> None:
    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].linear.double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            middle = self.layers[1]
            x = self.layers[2](middle(x.double()).float())
            out: Tensor = self.head(x)
            return out

    check_against_one_process(2, seeded(Mixed), square_loss, units=[Layer])


def test_modules_that_keep_their_own_list_of_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, 3)
            self.head = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x)[0])
            return out

    check_against_one_process(2, seeded(Recurrent), square_loss, units=[nn.LSTM])

    class Remembering(Layer):
        """Sees every assignment of a parameter, like modules that keep a list of their own."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "scale":
                self.__dict__["remembered"] = value
            super().__setattr__(name, value)

        def forward(self, x: Tensor) -> Tensor:
            remembered: Tensor = self.__dict__["remembered"]
            return x + torch.tanh(self.linear(x)) * remembered

    class RememberingStack(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Remembering() for _ in range(3))

    check_against_one_process(2, seeded(RememberingStack), square_loss, units=[Layer])


def test_a_module_without_parameters() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(nn.ReLU(), nn.Flatten()), backend, units=[nn.ReLU])
        assert model(torch.tensor([[-1.0, 2.0]])).tolist() == [[0, 2]]
        assert model.clip_grad_norm_(1.0).item() == 0

    run_ranks(2, work)
