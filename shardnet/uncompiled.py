"""`uncompiled`: marks functions that torch.compile must not trace.

[Note: uncompiled] In the code that a program compiles, torch calls shardnet: a module's hooks from Python, autograd's hooks and the methods
of a process group from C++. Dynamo treats these like the program's own functions and traces them. That takes long, fails for some, and for
others makes graphs that compute something else. `torch.compiler.disable` prevents that, but it imports all of dynamo, which takes a second,
and calls through a wrapper. This module has the same effect on the functions themselves: an attribute keeps dynamo from inlining one into a
graph, and a mark on its code keeps dynamo from compiling it when it is about to run.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")
_OURS = str(Path(__file__).parent)
_WHY = "the function belongs to shardnet, and graphs end there; to use fullgraph=True, compile the modules inside the units"
_NOR_WHAT_IT_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(thing: T) -> T:
    """Decorate a function, or a class to mark its own methods; functions that they call or define are not compiled either.

    A class's properties may be read in a graph. Its special methods, and the `forward` of a module, are left as they are.
    """
    for function in _functions(thing):
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_WHY, _torchdynamo_disable_recursive=True)
        _skip(function.__code__)
    for function in _getters(thing):
        _skip(function.__code__)
    return thing


def _functions(thing: Any) -> Iterator[FunctionType]:
    if isinstance(thing, type):
        for name, member in vars(thing).items():
            if not name.startswith("__") and name != "forward":
                yield from _functions(member)
    elif isinstance(thing, staticmethod | classmethod):
        yield from _functions(thing.__func__)
    elif isinstance(thing, FunctionType):
        if thing.__code__.co_filename.startswith(_OURS):  # a decorator's function may be shared by everybody, such as contextlib's
            yield thing
        yield from _functions(getattr(thing, "__wrapped__", None))


def _getters(thing: Any) -> Iterator[FunctionType]:
    if isinstance(thing, type):
        for member in vars(thing).values():
            if isinstance(member, property):
                yield from _functions(member.fget)


def _skip(code: CodeType) -> None:
    set_code_exec_strategy(code, _NOR_WHAT_IT_CALLS)
    for inner in code.co_consts:
        if inspect.iscode(inner):
            _skip(inner)
