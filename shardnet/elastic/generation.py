"""`Generation`: the state of one step, as far as one rank has it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardnet.state.piece import Piece, Span
from shardnet.state.snapshot import Snapshot


class Mark(NamedTuple):
    """Which state it is. Of two the later one counts: what an epoch has decided on makes all that was left of earlier epochs worthless,
    also to a worker that was away meanwhile and comes back with a higher step of an earlier epoch."""

    epoch: int
    step: int


@dataclass
class Generation:
    """Copies of what this rank and the one that entrusts it hold; lives through epochs, and is written to again when it is out of date."""

    mark: Mark
    complete: bool = False  # everything below is there
    spread: Snapshot = field(default_factory=Snapshot)  # this rank's pieces that nobody else has
    entrusted: Snapshot = field(default_factory=Snapshot)  # the same of the rank whose `keeper` this one is
    has_entrusted: bool = False
    local: Snapshot = field(default_factory=Snapshot)  # what others have as well, or what nobody else needs

    def pieces(self) -> list[Piece]:
        """All that it has, for whoever needs it; views of its memory."""
        found = [*self.spread.value(), *self.local.value()["pieces"]]
        if self.has_entrusted:
            found += self.entrusted.value()
        return [Piece(Span(name, start, stop), state) for name, start, stop, state in found]

    @property
    def nbytes(self) -> int:
        return self.spread.nbytes + self.entrusted.nbytes + self.local.nbytes


def plain(pieces: list[Piece]) -> list[Any]:
    """Pieces as a snapshot takes them."""
    return [(piece.span.name, piece.span.start, piece.span.stop, piece.state) for piece in pieces]
