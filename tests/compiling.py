"""What torch.compile makes of a program.

Ranks that compile are processes in the tests: torch compiles in several threads at once, and now and then that ends the process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Nothing has been compiled before, and the same code must not be compiled again and again within."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()
