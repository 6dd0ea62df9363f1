"""`LastWords`: what a rank whose program ends by an error tells the others.

On another machine a lost connection looks the same whatever has ended it. With these words each rank's error, and the rendezvous' log,
says what the first failure was, and not only where.
"""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from shardnet.errors import PeerLost, Preempted, chain
from shardnet.printable import printable
from shardnet.training.departure import Departure

_MOST = 300  # characters of an error's message
_CONSEQUENCES = (PeerLost, Preempted)


@dataclass(frozen=True, slots=True)
class LastWords:
    """text     why this rank has ended, for a sentence about it: "its program raised ValueError: …". One line
    follows  whether that follows from the end of another rank
    """

    text: str
    follows: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Those of a program that this error ends."""
        cause = _first(error)
        if not isinstance(cause, asyncio.CancelledError):
            return cls(f"its program raised {type(cause).__name__}{_message(cause)}", _follows(cause))
        number = Departure.current().signal
        return cls("its program was cancelled" if number is None else f"{signal.Signals(number).name} has ended its program")


def _first(error: BaseException) -> BaseException:
    """The error, or of a group the one that tells the most: not one that follows from another rank's failure, or from another task's."""
    leaves = list(_leaves(error))
    return min(leaves, key=lambda leaf: (isinstance(leaf, asyncio.CancelledError), _follows(leaf)))


def _follows(error: BaseException) -> bool:
    """Whether it comes from the end of another rank: programs wrap errors in their own."""
    return any(isinstance(each, _CONSEQUENCES) for each in chain(error))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _message(error: BaseException) -> str:
    try:
        words = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - the program's own class
        return ""
    return f": {printable(words, _MOST)}" if words else ""
