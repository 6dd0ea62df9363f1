"""How a program ends that a signal has interrupted."""

import gzip
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardnet
from shardnet.errors import UsageError

PROGRAM = """
import asyncio, atexit, gzip, sys, threading, time
import shardnet

class Freed:
    def __del__(self):
        print("freed")

async def main():
    print("begun", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")

def late():
    threading.main_thread().join()
    print("a thread")

freed = Freed()
text = open("text", "w")
text.write("words")
squeezed = gzip.open("squeezed", "wt")
squeezed.write("more words")
threading.Thread(target=late).start()
atexit.register(print, "at exit")
try:
    shardnet.run(main)
except ZeroDivisionError if len(sys.argv) == 1 else SystemExit as interrupted:
    print("caught", interrupted.code)
    sys.exit(7)
finally:
    print("finally")
"""
ENDED = ["begun", "cleaned up", "finally", "a thread", "at exit"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_that_python_promises_is_done_and_nothing_else(number: signal.Signals, tmp_path: Path) -> None:
    assert _interrupt(number, tmp_path) == (128 + number, ENDED)


def test_who_catches_it_goes_on_as_ever(tmp_path: Path) -> None:
    assert _interrupt(signal.SIGINT, tmp_path, "catch") == (7, [*ENDED[:2], "caught 130", *ENDED[2:], "freed"])


def test_a_coroutine_in_place_of_the_function_is_refused_in_words() -> None:
    """asyncio.run wants one, so it is what comes to the fingers."""

    async def main() -> None:
        raise AssertionError("never")

    with pytest.raises(UsageError, match=r"shardnet\.run\(main\), and not shardnet\.run\(main\(\)\)"):
        shardnet.run(main())  # type: ignore[arg-type]


def _interrupt(number: signal.Signals, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit status, and what it said. Its files are whole."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(number)
        rest, errors = process.communicate()
    assert errors == ""
    assert (folder / "text").read_text() == "words"
    with gzip.open(folder / "squeezed", "rt") as file:
        assert file.read() == "more words"
    return process.returncode, (said + rest).splitlines()
