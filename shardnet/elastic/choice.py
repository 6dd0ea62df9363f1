"""Which state to go on with, and who has what of it. Pure: every rank works out the same from what all ranks have told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shardnet.elastic.generation import Mark
from shardnet.errors import StateLost, UsageError
from shardnet.state.piece import Span, covered


@dataclass(frozen=True, slots=True)
class Offer:
    """One generation that a rank has."""

    rank: int
    mark: Mark
    structure: str  # equal for generations of the same parameters
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The state that all ranks go on with."""

    mark: Mark
    holders: dict[str, list[tuple[Span, int]]]  # of each parameter: spans and the ranks that have them, in order
    ranks: tuple[int, ...]  # that were there then, ascending; the first one speaks for all


def structure_of(sizes: Mapping[str, int]) -> str:
    """What is the same wherever the parameters have these names and numbers of elements."""
    return blake2b(repr(sorted(sizes.items())).encode(), digest_size=8).hexdigest()


def choose(offers: Sequence[Offer], sizes: Mapping[str, int]) -> Choice | None:
    """The latest state that is complete; None if nobody has any. `sizes` are the elements of each parameter.

    Raises StateLost if there is no complete one, and UsageError if they are not of these parameters.
    """
    for mark in sorted({offer.mark for offer in offers}, reverse=True):
        holders: dict[str, list[tuple[Span, int]]] = {name: [] for name in sizes}
        having = [offer for offer in offers if offer.mark == mark]
        for offer in having:
            if offer.structure != structure_of(sizes):
                raise UsageError(
                    f"the state of step {mark.step} is that of other parameters than the program's models have now: build the same models "
                    "in every epoch, and give State.resume() the same things in the same order"
                )
            for span in offer.spans:
                holders[span.name].append((span, offer.rank))
        if all(covered((span for span, _ in holders[name]), numel) for name, numel in sizes.items()):
            for held in holders.values():
                held.sort(key=lambda entry: (entry[0].start, entry[1]))
            return Choice(mark, holders, tuple(sorted(offer.rank for offer in having)))
    if not offers:
        return None
    latest = max(offer.mark for offer in offers)
    raise StateLost(
        f"the state of step {latest.step} (epoch {latest.epoch}) is lost: more workers are gone than there were copies of what they held"
    )


def sources(wanted: Span, holders: Sequence[tuple[Span, int]], rank: int) -> list[tuple[Span, int]]:
    """Where `rank` gets a span from, in order: from itself if it can, else from others in turn. `holders` must cover it."""
    found = []
    at = wanted.start
    while at < wanted.stop:
        having = [(span, holder) for span, holder in holders if span.start <= at < span.stop]
        span, holder = next((entry for entry in having if entry[1] == rank), having[rank % len(having)])
        stop = min(span.stop, wanted.stop)
        found.append((Span(wanted.name, at, stop), holder))
        at = stop
    return found


def keeper(rank: int, nodes: Sequence[Sequence[int]]) -> int:
    """The rank to which `rank` entrusts a copy of what it holds: each has one to keep.

    On another node, if there are several of one size: then a whole node may be lost. With nodes of different sizes that is so for most
    ranks.
    """
    world_size = sum(len(node) for node in nodes)
    shift = max(len(node) for node in nodes) if len(nodes) > 1 else 1
    return (rank + shift) % world_size


def apart(ranks: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """Those of `ranks`, the first ones first, that can leave together: none with its keeper."""
    chosen: list[int] = []
    for rank in ranks:
        if keeper(rank, nodes) not in chosen and all(keeper(other, nodes) != rank for other in chosen):
            chosen.append(rank)
    return chosen
