"""`Harm`: damage that a relay does once to bytes that pass."""

import random
from dataclasses import dataclass, field
from enum import StrEnum

from shardnet.testing.conditions import Way


class Kind(StrEnum):
    """What can be done to a block of bytes. A block is what the relay reads at once, up to 64 KiB."""

    FLIP = "flip a bit of"
    DUPLICATE = "pass twice"
    DROP = "lose"
    TRUNCATE = "lose the second half of"


@dataclass(slots=True)
class Harm:
    """Damage of one kind to the next block that is large enough; `fired` says whether it has happened."""

    kind: Kind
    way: Way
    least_bytes: int = 1
    fired: bool = False
    rng: random.Random = field(default_factory=random.Random, repr=False)

    def fits(self, block: bytes) -> bool:
        return not self.fired and len(block) >= self.least_bytes

    def done_to(self, block: bytes) -> bytes:
        """The block as the relay passes it on."""
        self.fired = True
        match self.kind:
            case Kind.FLIP:
                broken = bytearray(block)
                broken[self.rng.randrange(len(block))] ^= 1 << self.rng.randrange(8)
                return bytes(broken)
            case Kind.DUPLICATE:
                return block * 2
            case Kind.DROP:
                return b""
            case Kind.TRUNCATE:
                return block[: len(block) // 2]

    def __str__(self) -> str:
        return f"{self.kind} a block of {self.least_bytes} bytes or more on its way {self.way.value}"
