"""Each code block in the README or on a page under docs/ works: a test runs it, or it is a part of a program and compiles."""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardnet
from shardnet.cli.main import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@dataclass(frozen=True)
class Run:
    """A block that a test runs as it stands there."""

    test: str


@dataclass(frozen=True)
class Fragment:
    """A block that is not a program."""

    why: str


# Every block of Python, in the order in which they stand.
BLOCKS: dict[str, list[Run | Fragment]] = {
    "README.md": [
        Run("tests/test_readme.py::test_training_program"),
        Fragment("its loop is the reader's own"),
        Run("tests/test_readme.py::test_the_optimizer_alone"),
        Run("tests/test_readme.py::test_the_elastic_program_alone"),
        Run("tests/test_readme.py::test_the_elastic_program_in_a_test_of_its_own"),
    ],
    "docs/async.md": [Run("tests/docs/test_blocks.py::test_the_program_of_the_page_on_async")],
    "docs/checkpoints.md": [Run("tests/test_readme.py::test_the_programs_of_the_page_on_checkpoints")] * 2,
    "docs/elastic.md": [Run("tests/test_readme.py::test_the_program_of_the_page_on_workers_that_come_and_go")],
    "docs/frameworks.md": [
        Run("tests/interop/test_frameworks.py::test_accelerate"),
        Run("tests/interop/test_frameworks.py::test_trainer"),
        Run("tests/interop/test_frameworks.py::test_lightning"),
        Run("tests/interop/test_frameworks.py::test_ray"),
    ],
    "docs/gpu.md": [Run("tests/docs/test_blocks.py::test_the_program_of_the_page_on_gpus")],
    "docs/huggingface.md": [Run("tests/fsdp/test_huggingface.py::test_the_program_of_the_page")],
    "docs/metrics.md": [Run("tests/test_readme.py::test_the_program_of_the_page_on_metrics")],
    "docs/observing.md": [
        *[Run("tests/test_observing.py::test_the_programs_of_the_page")] * 2,
        Fragment("its model is the reader's own; tests/fsdp/test_surroundings.py has one"),
    ],
    "docs/pytorch.md": [
        Run("tests/interop/test_docs.py::test_the_program_of_the_page"),
        Fragment("its loop stands in tests/interop/recoveries.py, with what goes wrong in it"),
    ],
    "docs/scripts.md": [Run("tests/fsdp/test_scripts.py::test_an_average_of_the_weights")],
    "docs/testing.md": [
        Run("tests/testing/test_docs.py::test_the_page"),
        Run("tests/testing/test_docs.py::test_the_page"),
        Fragment("the worker behind the relay is elsewhere"),
    ],
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Our commands that are typed at a prompt, each on one line."""
    return re.findall(r"^\$ (?:\.venv/bin/)?shardnet (.*)$", page.read_text().replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_python_is_run_or_known_as_a_fragment(page: Path) -> None:
    known = BLOCKS.get(page.relative_to(ROOT).as_posix(), [])
    found = blocks(page)
    assert len(found) == len(known), f"{page.name} has {len(found)} blocks of Python, and {len(known)} are known here"
    for each, code in zip(known, found, strict=True):
        compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if isinstance(each, Run):
            file, _, test = each.test.partition("::")
            assert re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"there is no {each.test}"


def test_every_page_that_is_known_is_there() -> None:
    assert BLOCKS.keys() <= {page.relative_to(ROOT).as_posix() for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_is_understood(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line.removesuffix(" &"))
        assert parse(words).command == words[0]


async def test_the_program_of_the_page_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one it computes on the CPU."""
    (program,) = blocks(ROOT / "docs" / "gpu.md")
    monkeypatch.delenv("SHARDNET_RENDEZVOUS", raising=False)
    printed: list[str] = []
    names: dict[str, object] = {"print": printed.append}
    monkeypatch.setattr(shardnet, "run", lambda main: None)  # the loop is this test's
    exec(program, names)
    await names["main"]()  # type: ignore[operator]  # the program's function
    assert [line.partition(":")[0] for line in printed] == [f"step {step}" for step in (20, 40, 60, 80, 100)]


async def test_the_program_of_the_page_on_async(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = blocks(ROOT / "docs" / "async.md")
    monkeypatch.delenv("SHARDNET_RENDEZVOUS", raising=False)
    printed: list[tuple[object, ...]] = []
    names: dict[str, object] = {"print": lambda *values: printed.append(values)}
    monkeypatch.setattr(shardnet, "run", lambda main: None)  # the loop is this test's
    exec(program, names)
    await names["main"]()  # type: ignore[operator]  # the program's function
    assert [str(tensor) for tensor in printed[0]] == ["tensor([0., 0., 0., 0.])"] * 2
    assert len(printed) == 1
