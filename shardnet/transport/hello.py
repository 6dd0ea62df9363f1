"""What a worker says of itself when it opens a stream to a peer: gRPC metadata, checked before any chunk is read.

Metadata is ASCII, and a job's name need not be: values are percent-encoded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, unquote

from shardnet.errors import ProtocolError

_PREFIX = "shardnet-"

ACCEPTED = ("shardnet-accepted", "1")  # what the callee answers when it takes the stream


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls whom, in which epoch of which job."""

    job: str
    epoch: int
    source: int  # the caller's rank
    target: int  # the callee's rank, as the caller believes
    incarnation: str  # the caller's

    def metadata(self) -> tuple[tuple[str, str], ...]:
        values = {"job": self.job, "epoch": self.epoch, "source": self.source, "target": self.target, "incarnation": self.incarnation}
        return tuple((_PREFIX + key, quote(str(value))) for key, value in values.items())

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Self:
        """The hello in a call's metadata. Raises ProtocolError for a caller that is no worker."""
        found = {key.removeprefix(_PREFIX): value for key, value in metadata if key.startswith(_PREFIX)}
        try:
            return cls(
                job=_text(found["job"]),
                epoch=int(_text(found["epoch"])),
                source=int(_text(found["source"])),
                target=int(_text(found["target"])),
                incarnation=_text(found["incarnation"]),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError("the caller's metadata is not a worker's; only shardnet workers may call this service") from error


def _text(value: str | bytes) -> str:
    return unquote(value if isinstance(value, str) else value.decode("ascii"), errors="strict")
