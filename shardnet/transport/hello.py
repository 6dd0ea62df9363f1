"""What a worker says about itself when it opens a stream to a peer: gRPC metadata, checked before any chunk is read.

Metadata is ASCII, and a job's name need not be: values are percent-encoded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self
from urllib.parse import quote, unquote

from shardnet.errors import ProtocolError

_PREFIX = "shardnet-"
_SEPARATOR = ", "

ACCEPTED = ("shardnet-accepted", "1")  # what the callee answers when it takes the stream


@dataclass(frozen=True, slots=True)
class Hello:
    """Which rank calls which, in which epoch of which job."""

    job: str
    epoch: int
    source: int  # the caller's rank
    target: int  # the callee's rank, as the caller believes
    incarnation: str  # the caller's
    terms: str  # the caller's: see `terms_of`

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((_PREFIX + each.name, quote(str(getattr(self, each.name)))) for each in fields(self))

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Self:
        """Read the hello from a call's metadata. Raises ProtocolError if the caller is not a worker."""
        found = {key.removeprefix(_PREFIX): value for key, value in metadata if key.startswith(_PREFIX)}
        try:
            return cls(
                job=_text(found["job"]),
                epoch=int(_text(found["epoch"])),
                source=int(_text(found["source"])),
                target=int(_text(found["target"])),
                incarnation=_printable(found["incarnation"]),
                terms=_printable(found["terms"]),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError("the caller's metadata is not a worker's; only shardnet workers may call this service") from error


def terms_of(settings: Mapping[str, object]) -> str:
    """Settings that must be the same on all ranks, as text."""
    return _SEPARATOR.join(f"{name} {value}" for name, value in sorted(settings.items()))


def disagreement(theirs: str, mine: str) -> str | None:
    """How two texts of `terms_of` differ, in words; None if they do not."""
    if theirs == mine:
        return None
    left, right = theirs.split(_SEPARATOR), mine.split(_SEPARATOR)
    they, we = (
        _SEPARATOR.join(term for term in one if term not in other) or "no such setting" for one, other in ((left, right), (right, left))
    )
    return f"the caller has {they}, this rank has {we}"


def _text(value: str | bytes) -> str:
    return unquote(value if isinstance(value, str) else value.decode("ascii"), errors="strict")


def _printable(value: str | bytes) -> str:
    if not (text := _text(value)).isprintable():  # it goes into log lines
        raise ValueError
    return text
