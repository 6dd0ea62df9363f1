"""Modules that change outputs and inputs in place, or read weights through other modules: gradients equal those of one process."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.fsdp.parity import check_against_one_process
from tests.fsdp.stacks import WIDTH, Layer, Stack, seeded, square_loss

Tensor = torch.Tensor


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
