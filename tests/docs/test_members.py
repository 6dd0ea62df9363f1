"""Which members the API reference has."""

from pathlib import Path

import pytest
from sphinx.pycode import ModuleAnalyzer

from docs import members
from shardnet.backend import Backend, LoopbackBackend
from shardnet.fsdp import FSDP, ShardingStrategy


def test_comments_behind_members_and_fields_are_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "colour.py").write_text(
        'class Colour:\n    RED = "red"  # as blood\n    depth: int = 0  # in bits\n    bare: int = 1\n    ignored = 2  # noqa: X\n'
    )
    monkeypatch.setattr(ModuleAnalyzer, "cache", {})
    members.read_comments(package)
    assert ModuleAnalyzer.for_module("package.colour").find_attr_docs() == {
        ("Colour", "RED"): ["as blood", ""],
        ("Colour", "depth"): ["in bits", ""],
    }


@pytest.mark.parametrize(
    ("name", "member", "left_out"),
    [
        ("all_gather", Backend.all_gather, False),
        ("all_gather", LoopbackBackend.all_gather, True),
        ("backend", FSDP.backend, False),
        ("FULL_SHARD", ShardingStrategy.FULL_SHARD, False),
        ("_apply", FSDP._apply, None),
        ("field", 3, None),
    ],
)
def test_what_is_left_out(name: str, member: object, left_out: bool | None) -> None:
    assert members.skip(None, "class", name, member, True, None) is left_out
