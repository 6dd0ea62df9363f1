"""Damaging messages at random: `mutated`, and the messages that it starts from."""

import random
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt")
_WORDS = (
    b"\x00",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\x00\x00\x00\x40",
    b"\x7a\xff\xff\xff\xff\x07",
)


def corpus(kind: str) -> list[bytes]:
    """The saved messages of a kind, from lines of its name and the bytes in hexadecimal."""
    lines = (line.split() for line in CORPUS.read_text().splitlines() if line and not line.startswith("#"))
    return [bytes.fromhex("".join(data)) for name, *data in lines if name == kind]


def mutated(rng: random.Random, messages: Sequence[bytes]) -> bytes:
    """One of these messages after one to four random changes."""
    data = bytearray(rng.choice(messages))
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        until = min(len(data), at + rng.choice((1, 2, 8, 64)))
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:until]
            case 2:
                data[at:at] = data[at:until]
            case 3:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 4:
                word = rng.choice(_WORDS)
                data[at : at + len(word)] = word
            case 5:
                del data[at:]
            case _:
                other = rng.choice(messages)
                data[at:] = other[rng.randint(0, len(other)) :]
    return bytes(data)
