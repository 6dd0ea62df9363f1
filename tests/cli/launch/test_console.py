"""What the launcher has written."""

import io

import pytest

from shardnet.cli.launch.console import Console


@pytest.mark.parametrize("lines", [[], ["b"], ["a", "b"], ["", "a", "b"]])
async def test_it_knows_what_it_has_written_last(lines: list[str]) -> None:
    with Console(io.StringIO(), io.StringIO()) as console:
        await console.write(console.err, "[0] \n[0] a\n")
        await console.write(console.out, "[1] b\n")
        assert console.ends_with(lines)
        console.say("c")
        assert console.ends_with(lines) is (lines == [])


@pytest.mark.parametrize("lines", [["a"], ["b", "b"], ["a", "x", "a", "b"]])
async def test_and_what_not(lines: list[str]) -> None:
    with Console(io.StringIO(), io.StringIO()) as console:
        await console.write(console.err, "[0] a\n[1] b\n")
        assert not console.ends_with(lines)
