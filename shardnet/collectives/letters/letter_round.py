"""Small collectives among ranks of one node: the letters hold the data (see [Note: rounds] in round.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.letters.round import Course, Round
from shardnet.collectives.operation import Call
from shardnet.wire import Buffer


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part in a collective: the data in its letter to the others, and what it does with theirs."""

    data: Buffer
    finish: Callable[[Mapping[int, Buffer]], None]  # called with the data of the other ranks


class LetterRound(Round):
    """A round whose letters hold all the data (MPI's eager protocol)."""

    def __init__(self, mail: Mail, call: Call, share: Share, value: object) -> None:
        super().__init__(mail, call, share.data, value)
        self._finish = share.finish

    def _run(self) -> Course:
        yield from self.collect()
        self._finish(self._data)
        self.check_letters()

    def _sent(self) -> Mapping[int, int]:
        return dict.fromkeys(self._mail.views, len(self._letter)) if self._letter else {}

    def _received(self) -> Mapping[int, int]:
        return {rank: len(letter.data) for rank, letter in self._letters.items() if letter.data}

    def _forget(self) -> None:
        self._finish = lambda _: None
