"""`uncompiled`: what torch.compile steps over.

[Note: uncompiled] Within what a program compiles, torch calls us: a module's hooks from Python, autograd's hooks and the methods of a
process group from C++. To dynamo these are as good as the program's own: it traces them, which takes long, fails for some, and makes
graphs of others that compute something else. `torch.compiler.disable` says no to that, but imports all of dynamo, which takes a second,
and calls through a wrapper. This is what it comes to, on the functions themselves: an attribute for who would inline one into a graph,
and a mark on its code for who is about to run it.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")
_OURS = str(Path(__file__).parent)
_WHY = "it is shardnet's, where graphs end; fullgraph=True is for what units compute: compile these"
_NOR_WHAT_IT_CALLS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(thing: T) -> T:
    """Decorates a function, or a class for its own methods; what they call and define is not compiled either.

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
        if thing.__code__.co_filename.startswith(_OURS):  # a decorator's may be everybody's, such as contextlib's
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
