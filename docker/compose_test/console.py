"""What is said while it runs, with the time since the beginning in front."""

import time

_begin_s = time.monotonic()


class Failure(Exception):
    """The cluster, or something that it needs, does not do what it should. The message is all that is told of it."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - _begin_s:5.0f} s] {text}", flush=True)


def headline(text: str) -> None:
    print(flush=True)
    say(f"=== {text}")
