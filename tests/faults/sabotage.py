"""`Saboteur`: breaks messages on their way from rank to rank, between checksum and network."""

import random
from enum import StrEnum

import pytest

from shardnet.transport.http2 import Call
from shardnet.wire import Buffer

_TAGS = (0, 5, 14, 23, 28, 37)  # positions of a chunk's first tags: a field that is zero stays zero even if its tag is broken


class Harm(StrEnum):
    FLIP = "flipped"
    DROP = "dropped"
    DUPLICATE = "duplicated"
    TRUNCATE = "truncated"


class Saboteur:
    """Sits in all streams of this process, and breaks one message when it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.rng = random.Random(seed)
        self._harm: Harm | None = None
        self._skips = 0
        send, send_now = Call.send, Call.send_now

        async def sent(call: Call, *parts: Buffer) -> None:
            for message in self._changed(parts):
                await send(call, *message)

        def sent_now(call: Call, *parts: Buffer) -> None:
            for message in self._changed(parts):
                send_now(call, *message)

        patch.setattr(Call, "send", sent)
        patch.setattr(Call, "send_now", sent_now)

    def break_one(self, harm: Harm, *, after: int) -> None:
        """Break one message, after `after` others."""
        self._harm, self._skips = harm, after

    @property
    def has_fired(self) -> bool:
        return self._harm is None

    def _changed(self, parts: tuple[Buffer, ...]) -> list[tuple[Buffer, ...]]:
        if self._harm is None or not sum(map(len, parts)):
            return [parts]
        if self._skips:
            self._skips -= 1
            return [parts]
        harm, self._harm = self._harm, None
        message = bytearray(b"".join(parts))
        match harm:
            case Harm.FLIP:
                places = [place for place in range(len(message)) if place not in _TAGS]
                message[self.rng.choice(places)] ^= 1 << self.rng.randrange(8)
            case Harm.DROP:
                return []
            case Harm.DUPLICATE:
                return [(bytes(message),)] * 2
            case Harm.TRUNCATE:
                del message[self.rng.randrange(len(message)) :]
        return [(bytes(message),)]
