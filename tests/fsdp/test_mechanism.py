"""Everything that autograd and users do to a model between forward and step: gradients equal those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.parity import check_against_one_process, check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
WIDTH = 5


class Layer(nn.Module):
    """A residual layer with an odd number of parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Stack(nn.Module):
    """Three layers and a head; `forward` is what the tests vary."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def layer(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def stack_of(model: nn.Module) -> Stack:
    inner = model.module if isinstance(model, FSDP) else model
    assert isinstance(inner, Stack)
    return inner


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return kind()

    return make


def data(rank: int, width: int = WIDTH) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 + rank))


def square_loss(model: nn.Module, rank: int) -> Tensor:
    loss: Tensor = model(data(rank)).square().mean()
    return loss


# --- which parameters


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
    """As when a discriminator is frozen for the generator's backward. In one process, too, the gradients are dropped then."""

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
        """Layer 2's input is also layer 1's, so where it has an unused parameter it is known to be done after layer 1."""

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
        """Sees every assignment of a parameter, as modules do that keep a list beside."""

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


# --- which forwards and backwards


def test_a_unit_used_twice_in_one_forward() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 0, 2, 2, 2):
                x = self.layers[index](x)
            out: Tensor = self.head(x)
            return out

    check_against_one_process(2, seeded(Twice), square_loss, units=[Layer])

    def work(backend: Backend) -> None:
        model = FSDP(Twice(), backend, units=[Layer])
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        assert backend.telemetry.ops["reduce_scatter"].count == len(model.units)  # each once, however often it was used

    run_ranks(2, work)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_unit_with_units_inside_used_twice_in_a_row(prefetch: int) -> None:
    """What the first call returns is what the second one gets, so backward begins with the one before it ends the other."""

    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 0, 1, 1, 2):
                x = self.layers[index](x)
            out: Tensor = self.head(x)
            return out

    check_against_one_process(2, seeded(Twice), square_loss, units=[Layer, nn.Linear], prefetch=prefetch)


def test_a_unit_that_calls_itself() -> None:
    class Recursive(Layer):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = super().forward(x)
            again: Tensor = self(x, depth - 1) if depth else x
            return again + self.scale

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recursive()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    check_against_one_process(2, seeded(Outer), square_loss, units=[Recursive])


def test_several_forwards_before_one_backward() -> None:
    def two(model: nn.Module, rank: int) -> Tensor:
        first = model(data(rank))
        second = model(data(rank + 10))
        loss: Tensor = (first * second).sum()
        return loss

    check_against_one_process(2, seeded(Stack), two, units=[Layer])


def test_several_backwards_after_several_forwards() -> None:
    def both(model: nn.Module, rank: int) -> Tensor:
        return square_loss(model, rank) + square_loss(model, rank + 10)

    def train(model: FSDP, rank: int) -> None:
        first, second = square_loss(model, rank), square_loss(model, rank + 10)
        first.backward()  # type: ignore[no-untyped-call]
        second.backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Stack), both, units=[Layer], train=train)


def test_backward_twice_through_one_graph() -> None:
    def double(model: nn.Module, rank: int) -> Tensor:
        return 2 * square_loss(model, rank)

    def train(model: FSDP, rank: int) -> None:
        loss = square_loss(model, rank)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Stack), double, units=[Layer], train=train)


def test_forwards_that_no_backward_follows() -> None:
    def train(model: FSDP, rank: int) -> None:
        with torch.no_grad():
            model(data(rank))
        check_at_rest(model)
        with torch.inference_mode():
            model(data(rank))
        check_at_rest(model)
        model(data(rank + 5))  # with gradients, but for nothing
        assert all(parameter.dim() == 1 for parameter in model.parameters())
        model.eval()
        model.train()
        square_loss(model, rank).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Stack), square_loss, units=[Layer], train=train)


def test_only_part_of_the_outputs_is_used() -> None:
    class TwoHeads(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.other = Layer()

        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"main": super().forward(x), "other": self.other(x)}

    def main_loss(model: nn.Module, rank: int) -> Tensor:
        loss: Tensor = model(data(rank))["main"].square().mean()
        return loss

    check_against_one_process(2, seeded(TwoHeads), main_loss, units=[Layer], prefetch=2)


def test_skip_connections_between_units() -> None:
    class Skipping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            second = self.layers[1](first)
            out: Tensor = self.head(self.layers[2](second + first) + first)
            return out

    check_against_one_process(2, seeded(Skipping), square_loss, units=[Layer])


def test_a_part_of_the_model_called_by_itself() -> None:
    def part(model: nn.Module, rank: int) -> Tensor:
        loss: Tensor = stack_of(model).layer(1)(data(rank)).square().mean()
        return loss

    def work(backend: Backend) -> None:
        torch.manual_seed(3)
        model = FSDP(Stack(), backend, units=[Layer])
        part(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        check_at_rest(model)
        assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == [
            "layers.1.scale",
            "layers.1.linear.weight",
            "layers.1.linear.bias",
        ]

    run_ranks(2, work)


def test_inputs_that_require_gradients_get_them() -> None:
    inputs = [data(rank).requires_grad_() for rank in range(2)]

    def train(model: FSDP, rank: int) -> None:
        inputs[rank].grad = None
        model(inputs[rank]).square().mean().backward()

    check_against_one_process(2, seeded(Stack), square_loss, units=[Layer], train=train)
    alone = seeded(Stack)()
    for rank in range(2):
        reference = data(rank).requires_grad_()
        alone(reference).square().mean().backward()
        torch.testing.assert_close(inputs[rank].grad, reference.grad)


def test_gradients_of_inputs_alone_touch_no_parameter() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        x = data(backend.rank).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        check_at_rest(model)
        assert all(parameter.grad is None for parameter in model.parameters())

    run_ranks(2, work)


# --- what modules do to tensors


class InPlaceAfter(Stack):
    """Changes the layers' outputs in place; the layers return views."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
        out: Tensor = self.head(x)
        return out


class ViewLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight * self.scale).view(2, 2, -1).flatten(0, 1)[:]


def test_outputs_changed_in_place() -> None:
    check_against_one_process(2, seeded(InPlaceAfter), square_loss, units=[Layer])


def test_outputs_that_are_views_changed_in_place() -> None:
    class Views(InPlaceAfter):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ViewLayer() for _ in range(3))

    check_against_one_process(2, seeded(Views), square_loss, units=[Layer])


def test_inputs_changed_in_place() -> None:
    class ChangesInput(Layer):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(F.relu(x, inplace=True)) * self.scale
            return out

    class Changing(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(ChangesInput() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x))

    check_against_one_process(2, seeded(Changing), square_loss, units=[Layer])


def test_a_weight_read_through_detach() -> None:
    class Detaching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale.detach()
            return super().forward(y)

    class DetachingStack(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Detaching() for _ in range(3))

    check_against_one_process(2, seeded(DetachingStack), square_loss, units=[Layer])


# --- activation checkpointing


class Checkpointed(Stack):
    """Each layer recomputed; `reentrant` chooses the implementation."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class ReentrantCheckpointed(Checkpointed):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)  # reentrant checkpoints need an input that requires grad

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class CheckpointedInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False) * self.scale
        return out


class InsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedInside() for _ in range(3))


class ReentrantInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=True) * self.scale
        return out


class ReentrantInsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ReentrantInside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class RegionOfUnits(Stack):
    """One checkpoint around several units."""

    def _region(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self._region, x, use_reentrant=False))
        return out


class ReentrantRegion(RegionOfUnits):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self._region, self.stem(x), use_reentrant=True))
        return out


@pytest.mark.parametrize("kind", [Checkpointed, ReentrantCheckpointed, InsideStack, ReentrantInsideStack, RegionOfUnits, ReentrantRegion])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_activation_checkpointing(kind: type[Stack], prefetch: int) -> None:
    check_against_one_process(2, seeded(kind), square_loss, units=[Layer], prefetch=prefetch)


def test_a_checkpoint_around_the_whole_model() -> None:
    def recomputed(model: nn.Module, rank: int) -> Tensor:
        loss: Tensor = checkpoint(model, data(rank), use_reentrant=False).square().mean()
        return loss

    check_against_one_process(2, seeded(Stack), recomputed, units=[Layer])


# --- errors


class Failing(Stack):
    fail_in_forward = False
    fail_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.fail_in_forward:
                raise ArithmeticError("forward failed")
            if index == 1 and self.fail_in_backward:
                x.register_hook(_raise)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x)
        return out


def _raise(_: Tensor) -> None:
    raise ArithmeticError("backward failed")


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_forward_that_raises_leaves_nothing_gathered(prefetch: int) -> None:
    def train(model: FSDP, rank: int) -> None:
        inner = model.module
        assert isinstance(inner, Failing)
        inner.fail_in_forward = True
        with pytest.raises(ArithmeticError, match="forward failed"):
            model(data(rank))
        check_at_rest(model)
        inner.fail_in_forward = False
        square_loss(model, rank).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Failing), square_loss, units=[Layer], train=train, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_backward_that_raises_is_forgotten_at_the_next_forward(prefetch: int) -> None:
    def train(model: FSDP, rank: int) -> None:
        inner = model.module
        assert isinstance(inner, Failing)
        inner.fail_in_backward = True
        with pytest.raises(ArithmeticError, match="backward failed"):
            square_loss(model, rank).backward()  # type: ignore[no-untyped-call]
        inner.fail_in_backward = False
        model.zero_grad()
        square_loss(model, rank).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Failing), square_loss, units=[Layer], train=train, prefetch=prefetch)


def test_an_interrupted_forward_is_cleaned_up() -> None:
    def work(backend: Backend) -> None:
        inner = Stack()
        model = FSDP(inner, backend, units=[Layer])

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = inner.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(data(0))
        handle.remove()
        check_at_rest(model)
        model(data(0)).sum().backward()
        check_at_rest(model)

    run_ranks(1, work)


def test_reading_freed_parameters_raises_and_names_the_unit() -> None:
    class Keeping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.scale
            return super().forward(x)

    def work(backend: Backend) -> None:
        model = FSDP(nn.Sequential(Keeping(), nn.Linear(WIDTH, 1)), backend, units=[Layer], prefetch=0)
        model(data(0))
        kept = model.module[0].__dict__["kept"]  # type: ignore[index]
        for use in (lambda: kept * 1, lambda: kept.sum(), lambda: data(0).mul(kept), kept.tolist):
            with pytest.raises(RuntimeError, match="the full parameters of 0 are freed"):
                use()

    run_ranks(2, work)


def test_double_backward_is_refused() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        x = data(0).requires_grad_()
        with pytest.raises(StateError, match="create_graph"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model(x).sum().backward()
        check_at_rest(model)

    run_ranks(1, work)


# --- without synchronisation


@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_accumulate_without_communication(explicit: bool) -> None:
    def three(model: nn.Module, rank: int) -> Tensor:
        return square_loss(model, rank) + square_loss(model, rank + 10) + square_loss(model, rank + 20)

    def train(model: FSDP, rank: int) -> None:
        with model.no_sync():
            square_loss(model, rank).backward()  # type: ignore[no-untyped-call]
            square_loss(model, rank + 10).backward()  # type: ignore[no-untyped-call]
            assert all(parameter.grad is None for parameter in model.parameters())
            with pytest.raises(StateError, match="sync_gradients"):
                model.clip_grad_norm_(1.0)
            if explicit:
                square_loss(model, rank + 20).backward()  # type: ignore[no-untyped-call]
        if explicit:
            model.sync_gradients()
        else:
            square_loss(model, rank + 20).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Stack), three, units=[Layer], train=train)


def test_no_sync_reduces_nothing() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        before = backend.telemetry.ops["reduce_scatter"].count
        assert before > 0
        with model.no_sync():
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        assert backend.telemetry.ops["reduce_scatter"].count == before

    run_ranks(2, work)


def test_what_no_sync_left_is_reduced_once() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        once = backend.telemetry.ops["reduce_scatter"].count
        with model.no_sync():
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        assert backend.telemetry.ops["reduce_scatter"].count == 2 * once

    run_ranks(2, work)
