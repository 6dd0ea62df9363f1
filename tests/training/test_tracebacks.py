"""The traceback that a program's author reads when it fails under `shardnet.run`."""

import asyncio
import dataclasses
import logging
import ssl
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import shardnet
from shardnet import elastic
from shardnet.config import Timeouts
from shardnet.errors import PeerLost, UsageError
from shardnet.testing import local_cluster
from shardnet.training.tracebacks import shorten
from tests.fsdp.models import make_gpt

Main = Callable[[], Coroutine[Any, Any, None]]


def fails(main: Main) -> Exception:
    try:
        shardnet.run(main)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it has not failed")


def functions(error: BaseException | None) -> list[str]:
    """The functions that an error's traceback shows, the outermost first."""
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised(error: Exception) -> Main:
    async def inner() -> None:
        raise error

    async def main() -> None:
        async with asyncio.timeout(10.0):
            await inner()

    return main


@pytest.mark.parametrize("error", [ValueError("own"), UsageError("ours")])
def test_only_the_program_is_shown(error: Exception) -> None:
    assert fails(raised(error)) is error
    assert functions(error) == ["fails", "main", "inner"]


def test_an_error_of_ours_shows_nothing_of_how_it_came() -> None:
    async def main() -> None:
        async with local_cluster(2) as ranks:
            waiting = ranks[0].barrier()
            ranks[1].abort()
            await waiting

    error = fails(main)
    assert isinstance(error, PeerLost)
    assert functions(error) == ["fails", "main"]


def test_an_error_of_ours_shows_none_that_it_came_from() -> None:
    """Our error's text includes what a library has told us. What a library has told the program, the program may want to see."""

    async def main() -> None:
        try:
            ssl.create_default_context(cafile="/nowhere")
        except OSError as error:
            raise UsageError("there is no such file") from error

    def within_the_rooms() -> None:
        scope = {"__name__": "shardnet.credentials.somewhere", "ssl": ssl, "UsageError": UsageError}
        code = "try:\n    ssl.create_default_context(cafile='/nowhere')\nexcept OSError:\n    raise UsageError('there is no such file')"
        exec(code, scope)

    async def ours() -> None:
        within_the_rooms()

    assert fails(main).__cause__ is not None, "the program's own call"
    error = fails(ours)
    assert "FileNotFoundError" not in "".join(traceback.format_exception(error))


def test_an_error_of_ours_shows_one_of_the_programs_that_it_came_from() -> None:
    """However many errors are in between."""

    def callback() -> None:
        raise ValueError("the program's own")

    async def main() -> None:
        scope = {"__name__": "shardnet.somewhere", "callback": callback, "UsageError": UsageError}
        code = (
            "try:\n    try:\n        callback()\n    except ValueError as error:\n        raise OSError('between') from error\n"
            "except OSError as error:\n    raise UsageError('ours') from error"
        )
        exec(code, scope)

    assert "the program's own" in "".join(traceback.format_exception(fails(main)))


def test_an_error_of_the_programs_model_shows_no_wrapper() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, torch.ones(3, 3))

    async def main() -> None:
        async with shardnet.connect() as cluster:
            model = await cluster.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), Layer()))
            await model(torch.ones(2, 4))

    error = fails(main)
    assert isinstance(error, RuntimeError)
    assert functions(error) == ["fails", "main", "forward", "forward"]  # the forwards of Sequential and Layer


def test_an_error_that_may_be_our_mistake_shows_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("shardnet.fsdp.runtime.Runtime.before_forward", mistaken)

    async def main() -> None:
        async with shardnet.connect() as cluster:
            model = await cluster.shard(make_gpt())
            await model(torch.zeros(1, 4, dtype=torch.long))

    shown = functions(fails(main))
    assert shown[:2] == ["fails", "main"]
    assert shown[-1] == "mistaken"
    assert len(shown) > 3


async def refused() -> UsageError:
    """An error that has passed through shardnet's code."""
    async with local_cluster(1) as ranks:
        try:
            await ranks[0].all_gather(torch.ones(2), sizes=[1])
        except UsageError as error:
            return error
    raise AssertionError("it was not refused")


async def causes() -> None:
    raise ValueError("outer") from await refused()


async def is_a_member() -> None:
    raise ExceptionGroup("outer", [await refused()])


async def is_a_context() -> None:
    async with local_cluster(1) as ranks:
        try:
            await ranks[0].all_gather(torch.ones(2), sizes=[1])
        except UsageError:
            raise ValueError("outer")  # noqa: B904 - that is the case


@pytest.mark.parametrize(("main", "function"), [(causes, "refused"), (is_a_member, "refused"), (is_a_context, "is_a_context")])
def test_what_is_shown_with_it_is_short_too(main: Main, function: str) -> None:
    error = fails(main)
    (shown,) = error.exceptions if isinstance(error, ExceptionGroup) else [error.__cause__ or error.__context__]
    assert isinstance(shown, UsageError)
    assert functions(shown) == [function]


def test_of_what_no_program_has_called_the_call_of_run_is_all() -> None:
    """For example if `main` is a lambda that calls elastic.run."""
    error = fails(lambda: elastic.run(None, every=0))  # type: ignore[arg-type]  # it does not come so far
    assert isinstance(error, UsageError)
    assert functions(error) == ["fails"]


def test_a_mistake_of_ours_that_no_program_has_called_stays_as_it_is() -> None:
    with pytest.raises(TypeError) as caught:
        Timeouts(suspect_s="long")  # type: ignore[arg-type]
    error = caught.value
    ours = error.__traceback__.tb_next  # type: ignore[union-attr]
    before = traceback.extract_tb(ours)
    shorten(error.with_traceback(ours))
    assert traceback.extract_tb(error.__traceback__) == before
    assert before


def test_classes_that_forbid_assignment_and_errors_that_show_none() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        setting: str

    async def main() -> None:
        try:
            raise Frozen("lr")
        except Frozen as error:
            raise ValueError("outer") from error

    error = fails(main)
    assert isinstance(error, ValueError)
    assert functions(error.__cause__) == ["main"]


def test_a_group_that_is_no_exception_is_shortened_too() -> None:
    async def main() -> None:
        raise BaseExceptionGroup("several", [KeyboardInterrupt()])

    with pytest.raises(BaseExceptionGroup) as caught:
        shardnet.run(main)
    assert functions(caught.value)[-1] == "main"
    assert "guarded" not in functions(caught.value)


def test_circles_of_causes_end() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    shorten(first)


def test_the_log_has_it_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="shardnet.training.program"):
        fails(raised(UsageError("ours")))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_text is not None
    assert "in guarded" in record.exc_text
