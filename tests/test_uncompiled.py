"""Functions that torch.compile steps over: they run uncompiled, whoever calls them, and the rest of the program is compiled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.pending import Pending
from shardnet.uncompiled import uncompiled
from tests.compiling import Graphs
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def graphs_of(function: Function) -> list[list[str]]:
    """The graphs that are compiled of a function, which must return the same as without compiling."""
    graphs = Graphs()
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(torch.compile(function, backend=graphs)(x), function(x))
    return graphs.calls


def helper(x: Tensor) -> Tensor:
    return x.sin()


@contextmanager
def resource() -> Iterator[int]:
    yield 2


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this file count as shardnet's code."""
    monkeypatch.setattr(sys.modules["shardnet.uncompiled"], "_OURS", __file__)


@pytest.mark.usefixtures("ours")
class TestMarks:
    def test_a_function_and_what_it_calls_is_no_part_of_a_graph(self) -> None:
        @uncompiled
        def step(x: Tensor) -> Tensor:
            return helper(x.exp())

        assert graphs_of(lambda x: step(x.relu()).cos()) == [["relu"], ["cos"]]
        assert graphs_of(lambda x: helper(x.relu()).cos()) == [["relu", "sin", "cos"]]

    def test_what_a_function_defines_is_none_either(self) -> None:
        """For example a hook that autograd calls after the function has returned."""
        seen: list[Tensor] = []

        @uncompiled
        def attach(leaf: Tensor) -> None:
            leaf.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.sin()))  # type: ignore[no-untyped-call]

        leaf = torch.ones(2, requires_grad=True)
        attach(leaf)

        def backward(x: Tensor) -> Tensor:
            (leaf * x).sum().backward()  # type: ignore[no-untyped-call]
            return x.relu()

        graphs = graphs_of(backward)
        assert len(seen) == 2
        assert not any("sin" in graph for graph in graphs)

    def test_a_class_has_its_methods_marked_and_not_its_bases(self) -> None:
        class Base:
            def inherited(self, x: Tensor) -> Tensor:
                return x.sin()

        @uncompiled
        class Kind(Base):
            def method(self, x: Tensor) -> Tensor:
                return x.exp()

            @classmethod
            def of_class(cls, x: Tensor) -> Tensor:
                return x.exp()

            @staticmethod
            def of_none(x: Tensor) -> Tensor:
                return x.exp()

            @property
            def number(self) -> int:
                return 3

            def forward(self, x: Tensor) -> Tensor:
                return x.sin()

            def __call__(self, x: Tensor) -> Tensor:
                return x.sin()

        kind = Kind()
        for method in (kind.method, kind.of_class, kind.of_none):
            assert graphs_of(lambda x, method=method: method(x.relu()).cos()) == [["relu"], ["cos"]], method  # type: ignore[misc]
        for method in (kind.inherited, kind.forward, kind):
            assert graphs_of(lambda x, method=method: method(x.relu()).cos()) == [["relu", "sin", "cos"]], method  # type: ignore[misc]
        assert graphs_of(lambda x: x.relu() * kind.number) == [["relu", "mul"]]

    def test_a_decorator_of_others_is_not_marked(self) -> None:
        """All functions that contextlib's decorator makes share the same code, so none may be marked."""

        @uncompiled
        class Kind:
            @contextmanager
            def managed(self) -> Iterator[int]:
                yield 2

        with Kind().managed() as number:
            assert number == 2

        def with_resource(x: Tensor) -> Tensor:
            with resource() as number:
                return x.sin() * number

        assert graphs_of(with_resource) == [["sin", "mul"]]


def test_functions_of_others_are_left_alone() -> None:
    assert uncompiled(helper) is helper
    assert graphs_of(lambda x: helper(x.relu())) == [["relu", "sin"]]


def test_collectives_of_a_backend_may_be_called_in_what_is_compiled() -> None:
    def work(backend: Backend) -> None:
        def compute(x: Tensor) -> Tensor:
            begun = backend.all_reduce(x * 2)
            assert isinstance(begun, Pending)
            return torch.cat([begun.wait().relu() + backend.rank, backend.all_gather(x).wait()])

        for size in (2, 3, 4):
            x = torch.arange(float(size)) - backend.rank
            assert torch.equal(torch.compile(compute, backend=graphs)(x), compute(x))
        rank = torch.compile(lambda x: x * backend.rank + backend.world_size, backend="eager", fullgraph=True)
        assert rank(torch.ones(2)).tolist() == [backend.rank + 2.0] * 2

    graphs = Graphs()
    run_ranks(2, work)
    assert graphs.calls
    assert not graphs.traced
