"""`Generation`: the state of one step, as far as one rank has it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardnet.state.piece import Piece, Span
from shardnet.state.snapshot import Snapshot


class Mark(NamedTuple):
    """Identifies a state. Of two states the one with the later mark counts: the choice of an epoch makes all states of earlier epochs
    worthless, even if a worker that was away comes back with a higher step of an earlier epoch."""

    epoch: int
    step: int


@dataclass
class Generation:
    """Copies of what this rank holds and of what the rank that entrusts its copy to it holds; lives through epochs, and is overwritten when
    it is out of date."""

    mark: Mark
    complete: bool = False  # everything below is there
    spread: Snapshot = field(default_factory=Snapshot)  # this rank's pieces that no other rank has
    entrusted: Snapshot = field(default_factory=Snapshot)  # the same of the rank whose `keeper` this one is
    has_entrusted: bool = False
    local: Snapshot = field(default_factory=Snapshot)  # state that other ranks have as well, or that no other rank needs
    taken_over: list[Snapshot] = field(default_factory=list)  # of pieces of which ranks that leave have the others

    def begin(self, mark: Mark) -> None:
        """Overwrite it from now on, for this state."""
        self.complete, self.mark = False, mark
        self.taken_over.clear()

    def pieces(self) -> list[Piece]:
        """All pieces in it, for the ranks that need them; views of its memory."""
        found = [*self.spread.value(), *self.local.value()["pieces"]]
        if self.has_entrusted:
            found += self.entrusted.value()
        for copy in self.taken_over:
            found += copy.value()
        return [Piece(Span(name, start, stop), state) for name, start, stop, state in found]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.spread, self.entrusted, self.local, *self.taken_over))


def plain(pieces: list[Piece]) -> list[Any]:
    """Pieces in the form that a snapshot takes."""
    return [(piece.span.name, piece.span.start, piece.span.stop, piece.state) for piece in pieces]
