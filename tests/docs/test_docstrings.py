"""What our docstrings become on their way to Sphinx."""

import inspect

import pytest

from docs import docstrings
from shardnet import errors, fsdp
from shardnet.settings import Settings


def rendered(text: str) -> str:
    return "\n".join(docstrings.rendered(inspect.cleandoc(text).split("\n"))).strip()


def test_backticks_become_code_and_nothing_else_means_anything() -> None:
    assert rendered("See `a_b` and clip_grad_norm_, **all** of a|b.") == r"See ``a_b`` and clip\_grad\_norm\_, \*\*all\*\* of a\|b."
    assert rendered("`State`s, and `a`(`b`)") == r"``State``\ s, and ``a``\ (``b``)"


def test_code_may_go_over_the_end_of_a_line() -> None:
    assert rendered("Call `shardnet\nrun` first.") == "Call ``shardnet run`` first."


def test_two_columns_become_a_list_of_definitions() -> None:
    text = """
        rank       from 0
        host_name  of a machine, which goes
                   on `here`
        """
    assert rendered(text) == "``rank``\n   from 0\n``host_name``\n   of a machine, which goes\n   on ``here``"


def test_names_that_are_too_long_stand_alone() -> None:
    block = ["every     steps", "checkpoints, keep", "          a folder"]
    assert docstrings.entries(block) == [("every", ["steps"]), ("checkpoints, keep", ["a folder"])]
    assert docstrings.entries(block[1:]) == [("checkpoints, keep", ["a folder"])]


@pytest.mark.parametrize(
    "text",
    [
        "One sentence.\nAnother one.",
        "- a point\n  that goes on",
        "  an  example",
        "rank      from 0\nhost_name of a machine",
        "`a`  is b\nand so is c.",
    ],
)
def test_what_is_no_list(text: str) -> None:
    assert docstrings.entries(text.split("\n")) == []


def test_examples_are_code_with_their_empty_lines() -> None:
    text = "For example\n\n    a = 1\n\n    b = `c`\n\nand so on."
    assert rendered(text) == "For example\n\n.. code-block:: python\n\n   a = 1\n\n   b = `c`\n\nand so on."


def test_drawings_stay_as_they_are() -> None:
    text = rendered(errors.__doc__ or "")
    assert text.startswith("Every error that shardnet raises.\n\n.. code-block:: text\n\n   ShardnetError\n   ├── UsageError (ValueError) ")


def test_settings_have_a_definition_for_each_field() -> None:
    text = rendered(Settings.__doc__ or "")
    assert [name for name in Settings.__dataclass_fields__ if f"\n``{name}``\n   " not in text] == []


def test_of_a_package_only_the_first_paragraph_is_for_users() -> None:
    lines = (fsdp.__doc__ or "").split("\n")
    docstrings.process(None, "module", "shardnet.fsdp", fsdp, None, lines)
    assert lines == ["Fully sharded data parallel training: parameters, gradients and optimizer state spread over ranks.", ""]
