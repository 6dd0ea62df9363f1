"""Messages while it runs, each with the time since the beginning in front."""

import time

_begin_s = time.monotonic()


class Failure(Exception):
    """The cluster, or something that it needs, does not do what it should. Only its message is shown."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - _begin_s:5.0f} s] {text}", flush=True)


def headline(text: str) -> None:
    print(flush=True)
    say(f"=== {text}")
