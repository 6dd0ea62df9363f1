"""What torch.compile makes of a program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardnet

_PACKAGE = str(Path(shardnet.__file__).parent)


class Graphs:
    """A backend of torch.compile, which runs graphs as they are.

    calls   the operations that are called in each graph
    traced  lines of shardnet's own code that have got into a graph
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.traced: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        called = [node for node in graph.graph.nodes if node.op.startswith("call")]
        self.calls.append([node.name for node in called])
        frames = [line.strip() for node in called for line in (node.stack_trace or "").splitlines()]
        self.traced += [line for line in frames if _PACKAGE in line and not line.endswith(" in forward")]  # it calls the program's
        return graph.forward
