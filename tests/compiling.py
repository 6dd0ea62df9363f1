"""What torch.compile makes of a program.

Ranks that compile are processes in the tests, as they are for users. torch's compiler has one lock for a process, and as threads, on a busy
machine, one rank was once aborted in C++ in what had been compiled, while the other compiled or ended.
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


def compiled_as_plain(train: Callable[[Callable[..., Any]], list[torch.Tensor]]) -> tuple[int, list[str]]:
    """Compare what `train(compiler)` returns with torch's compiler and with one that does nothing; the number of graphs, and our own lines
    in them."""
    graphs = Graphs()
    with nothing_compiled():
        without = train(lambda plain: plain)
        assert train(lambda plain: torch.compile(plain, backend=graphs)) == without
    return len(graphs.calls), graphs.traced
