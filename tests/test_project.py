"""The project's own files say the same thing: versions, pins, generated code, make targets."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from importlib import util
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import shardnet

ROOT = Path(__file__).resolve().parent.parent
PB = ROOT / "shardnet" / "pb"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)")


def requirements() -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"]]


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [PIN.fullmatch(line) for line in lines]
    assert all(matches), f"only name==version lines: {[line for line, match in zip(lines, matches, strict=True) if not match]}"
    return {match[1]: Version(match[2]) for match in matches if match}


def floor(name: str) -> Version:
    (requirement,) = (requirement for requirement in requirements() if requirement.name == name)
    (lowest,) = (Version(each.version) for each in requirement.specifier if each.operator == ">=")
    return lowest


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_constraints_pin_every_direct_dependency_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[requirement.name])


def test_protobuf_floor_is_what_the_generated_code_demands() -> None:
    (demanded,) = {found for path in PB.glob("*_pb2.py") for found in re.findall(r"Protobuf Python Version: (\S+)", path.read_text())}
    assert floor("protobuf") == Version(demanded)


def test_grpc_floor_is_what_the_generated_stubs_demand() -> None:
    (demanded,) = {
        found for path in PB.glob("*_pb2_grpc.py") for found in re.findall(r"GRPC_GENERATED_VERSION = '(\S+)'", path.read_text())
    }
    assert floor("grpcio") == floor("grpcio-health-checking") == floor("grpcio-tools") == Version(demanded)


@pytest.fixture
def generator() -> ModuleType:
    """protos/generate.py as a module; it is a script outside of any package."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools belongs to the dev extra")
    spec = util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_code_is_what_the_protos_say(generator: ModuleType, tmp_path: Path) -> None:
    generator.generate(tmp_path)
    assert generator.drift(tmp_path / "shardnet" / "pb", PB) == []


def test_drift_is_noticed(generator: ModuleType, tmp_path: Path) -> None:
    committed = tmp_path / "pb"
    shutil.copytree(PB, committed, ignore=shutil.ignore_patterns("__pycache__"))
    assert generator.drift(PB, committed) == []

    (committed / "mesh_pb2.py").write_text("edited by hand\n")
    (committed / "stats_pb2.pyi").unlink()
    (committed / "former_pb2.py").write_text("left over\n")
    assert generator.drift(PB, committed) == ["former_pb2.py", "mesh_pb2.py", "stats_pb2.pyi"]


def test_installed_package_is_this_project() -> None:
    assert importlib.metadata.version("shardnet") == PROJECT["version"]
    (command,) = (entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "shardnet")
    assert callable(command.load())


def make(*arguments: str) -> str:
    # If make runs these tests, it passes its own variables on; they must not affect what is tested.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "ARGS")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_what_is_imported_when_it_is_used_is_listed_before() -> None:
    assert {"connect", "run", "FSDP"} <= set(dir(shardnet))


def test_make_alone_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    listed = re.findall(r"^  make ([a-z-]+)", make(), re.MULTILINE)
    assert sorted(listed) == sorted(phony[1].split())


@pytest.mark.parametrize(("python", "environment"), [("python3.13", ".venv-python3.13"), ("/opt/py/bin/python3.12", ".venv-python3.12")])
def test_each_interpreter_has_an_environment_of_its_own(python: str, environment: str) -> None:
    commands = make("-n", "test", f"PYTHON={python}", "JOBS=0", "ARGS=-x")
    assert f"{environment}/bin/python -m pytest -n 0 --dist loadfile --max-worker-restart 0 -x" in commands


ROOMS = [file.parent for file in sorted((ROOT / "shardnet").rglob("__init__.py")) if file.parent not in (ROOT / "shardnet", PB)]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_each_room_says_where_each_of_its_files_comes_in(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = {file.name for file in room.glob("*.py")} - {"__init__.py"}
    assert {file for file in files if Path(file).stem not in re.findall(r"\w+", text)} == set()
    assert set(re.findall(r"(?<![\w/])\w+\.py", text)) - files == set(), "named, but not there"


SOURCES = [file for file in sorted((ROOT / "shardnet").rglob("*.py")) if file.parent != PB]
NOTES = [(note, file) for file in SOURCES for note in re.findall(r"^ *(?:# |\"\"\")?\[Note: ([^]]+)\] \w", file.read_text(), re.M)]


def test_each_note_is_written_once() -> None:
    assert [name for name, count in Counter(name for name, _ in NOTES).items() if count > 1] == []


@pytest.mark.parametrize("file", [*SOURCES, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda file: str(file.relative_to(ROOT)))
def test_notes_are_where_readers_are_sent(file: Path) -> None:
    text = re.sub(r"\n\s*(?:# )?", " ", file.read_text())
    for name, where in re.findall(r"\[Note: ([^]]+)\](?: (?:in|of) `?([\w/]+\.py))?", text):
        homes = [home for note, home in NOTES if note == name]
        assert homes, f"nobody has written [Note: {name}]"
        assert not where or homes[0].as_posix().endswith(f"/{where}"), f"[Note: {name}] is in {homes[0]}, not in {where}"
