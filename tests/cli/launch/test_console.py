"""What the launcher prints."""

import errno
import io
import os

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


async def test_who_has_ended_in_the_same_way_since_changes_nothing() -> None:
    with Console(io.StringIO(), io.StringIO()) as console:
        await console.write(console.err, ["Traceback (most recent call last):", "UsageError: [rank 1/2 epoch 1] no"], "[1] ")
        await console.write(console.err, ["UsageError: [rank 0/2 epoch 1] no (with the traceback of rank 1)"], "[0] ")
        for rank in range(2):
            assert console.ends_with(["Traceback (most recent call last):", f"UsageError: [rank {rank}/2 epoch 1] no"])
        assert not console.ends_with(["UsageError: [rank 0/2 epoch 1] yes"])
        await console.write(console.err, ["bye (with the trains)"], "[0] ")
        assert not console.ends_with(["UsageError: [rank 1/2 epoch 1] no"])


async def test_what_goes_elsewhere_does_not_stand_above() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with Console(io.StringIO(), Terminal()) as console:
        await console.write(console.err, ["a"])
        await console.write(console.out, ["b"])
        assert console.ends_with(["a"])
        assert not console.ends_with(["b"])


@pytest.mark.parametrize("name", ["standard output", "standard error"])
async def test_an_error_says_what_could_not_be_written(name: str) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Console(Full(), Full()) as console, pytest.raises(OSError, match=rf"No space left on device: '{name}'"):
        await console.write(console.out if name == "standard output" else console.err, ["a"])
