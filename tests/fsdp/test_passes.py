"""The order of passes: units used twice, several forwards and backwards, parts of a model: gradients equal those of one process."""

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_against_one_process, check_at_rest
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import Layer, Stack, data, seeded, square_loss, stack_of

Tensor = torch.Tensor


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
    """The first call's result is the second one's input, so backward begins with one before it ends the other."""

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
        model(data(rank + 5))  # it could have gradients, but has no backward
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


def test_units_may_return_objects_of_classes_of_their_own() -> None:
    class Found:
        def __init__(self, values: list[Tensor]) -> None:
            self.values = values
            self.count = len(values)

    class Finder(Layer):
        def forward(self, x: Tensor) -> Found:  # type: ignore[override]
            return Found([super().forward(x)])

    class Finding(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Finder() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                (x,) = layer(x).values
            out: Tensor = self.head(x)
            return out

    check_against_one_process(2, seeded(Finding), square_loss, units=[Finder])


class Leaving(Layer):
    """Leaves an auxiliary loss behind, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = (out * self.scale).square().mean()
        return out


class Experts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaving() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x).square().mean()
        for layer in self.layers:
            assert isinstance(layer, Leaving)
            out = out + 10 * layer.loss
        return out


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_loss_that_leaves_a_unit_unseen_is_an_error(prefetch: int, ranks_per_node: int) -> None:
    """Backward comes to it before it comes to what the unit has returned. It must not compute with memory that is only being filled."""

    def work(backend: Backend) -> None:
        model = FSDP(seeded(Experts)(), backend, units=[Leaving], prefetch=prefetch)
        loss = model(data(backend.rank))
        with pytest.raises(RuntimeError, match=r"the full parameters of layers\.\d are freed.*another way than the unit's outputs"):
            loss.backward()

    run_ranks(2, work, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_and_none_where_parameters_are_kept_until_then(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> dict[str, Tensor]:
        model = FSDP(seeded(Experts)(), backend, units=[Leaving], strategy=strategy)
        model(data(7)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.full_state_dict()

    alone = seeded(Experts)()
    alone(data(7)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for got in run_ranks(2, work):
        torch.testing.assert_close(got, dict(alone.state_dict()))


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
        model = FSDP(seeded(Stack)(), backend, units=[Layer])
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
