"""What the launcher has written."""

import io

import pytest

from shardnet.cli.launch.console import Console


@pytest.mark.parametrize("lines", [[], ["b"], ["a", "b"], ["", "a", "b"]])
async def test_it_knows_what_it_has_written_last(lines: list[str]) -> None:
    with Console(io.StringIO(), io.StringIO()) as console:
        await console.write(console.err, ["", "a"], "[0] ")
        await console.write(console.out, ["b"], "[1] ")
        assert console.ends_with(lines)
        console.say("c")
        assert console.ends_with(lines) is (lines == [])


@pytest.mark.parametrize("lines", [["a"], ["b", "b"], ["", "b"], ["x", "a", "b"], ["] b"]])
async def test_and_what_not(lines: list[str]) -> None:
    with Console(io.StringIO(), io.StringIO()) as console:
        await console.write(console.err, ["a", "b"], "[0] ")
        assert not console.ends_with(lines)


async def test_what_goes_elsewhere_does_not_stand_above() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with Console(io.StringIO(), Terminal()) as console:
        await console.write(console.err, ["a"])
        await console.write(console.out, ["b"])
        assert console.ends_with(["a"])
        assert not console.ends_with(["b"])
