"""Tracebacks shortened for the author of a program.

[Note: short tracebacks] Between `shardnet.run(main)` and `main` lies the event loop, the same in every traceback, and between a model and
its layers lie wrappers and hooks. Such passages are left out. The message of an error of ours already says what went wrong, where and what
to do: its path through our packages and autograd helps nobody, least of all when each rank that has lost the same peer prints it. Of a
ShardnetError only the program's own lines are shown, without the errors that caused it, unless the program raised one of those. Any other
error keeps all of our lines except passages: it may be a mistake of ours.

The log has the full traceback, at level DEBUG.
"""

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from shardnet.errors import ShardnetError

_PASSAGES = (
    "asyncio",
    "concurrent",
    "contextlib",
    "shardnet.fsdp.async_wrapper",
    "shardnet.fsdp.wrapper",
    "shardnet.training.program",
    "torch.nn.modules.module",
    "uvloop",
)
_ROOMS = (*_PASSAGES, "shardnet", "torch")
_LIBRARIES = (*_ROOMS, "grpc", *sys.stdlib_module_names)  # modules that shardnet itself calls


def shorten(error: BaseException) -> None:
    """Remove from an error's traceback, and from those shown with it, what [Note: short tracebacks] says."""
    left, known = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in known:
            known.add(id(each))
            if isinstance(each, ShardnetError) and not any(_is_the_programs(other) for other in _roots(each)):
                each.__cause__ = None  # setting it also hides the context
            BaseException.with_traceback(each, _linked(_kept(each)))  # not by assignment: some classes forbid it
            left += (other for other in _shown_with(each) if isinstance(other, BaseException))


def _roots(error: BaseException) -> list[BaseException]:
    """All errors that are shown with this one, directly or indirectly."""
    found = [error]
    for each in found:  # the list grows while it is read
        found += [other for other in _shown_with(each) if isinstance(other, BaseException) and other not in found]
    return found[1:]


def _is_the_programs(error: BaseException) -> bool:
    return any(not _is_in(entry.tb_frame, _LIBRARIES) for entry in _entries(error.__traceback__))


def _kept(error: BaseException) -> list[TracebackType]:
    entries = list(_entries(error.__traceback__))
    own = [entry for entry in entries if not _is_in(entry.tb_frame, _ROOMS)]
    if isinstance(error, ShardnetError):
        return own
    if not own:  # it was raised and caught within our packages
        return entries
    *way, end = entries[entries.index(own[0]) :]
    return [*(entry for entry in way if not _is_in(entry.tb_frame, _PASSAGES)), end]


def _shown_with(error: BaseException) -> Iterator[object]:
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    yield error.__cause__
    if not error.__suppress_context__:
        yield error.__context__


def _is_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = f"{frame.f_globals.get('__name__')}."
    return any(name.startswith(f"{module}.") for module in modules)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    linked = None
    for entry in reversed(entries):
        linked = TracebackType(linked, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return linked
