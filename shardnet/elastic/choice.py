"""Chooses the state to go on with, and finds which ranks have which parts. No I/O: each rank computes the same from what all have told."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shardnet.elastic.generation import Mark
from shardnet.errors import StateLost, UsageError
from shardnet.state.piece import Span, covered

COPIES = 2  # of each part, with the part itself


@dataclass(frozen=True, slots=True)
class Offer:
    """One generation that a rank has."""

    rank: int
    mark: Mark
    structure: str  # the same for generations of the same parameters
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The state that all ranks go on with."""

    mark: Mark
    holders: dict[str, list[tuple[Span, int]]]  # of each parameter: spans and the ranks that have them, in order
    ranks: tuple[int, ...]  # that have this state, ascending; the first one gives what is the same on all


@dataclass(frozen=True, slots=True)
class Handover:
    """A copy that one rank makes for another."""

    giver: int
    taker: int
    of: int | frozenset[int]  # the rank whose own part it is, or the ranks that all hold this part


def structure_of(sizes: Mapping[str, int]) -> str:
    """A hash of the parameters' names and numbers of elements."""
    return blake2b(repr(sorted(sizes.items())).encode(), digest_size=8).hexdigest()


def choose(offers: Sequence[Offer], sizes: Mapping[str, int]) -> Choice | None:
    """The latest complete state; None if no rank has any. `sizes` are the numbers of elements of the parameters.

    Raises StateLost if no state is complete, and UsageError if a state is not of these parameters.
    """
    structure = structure_of(sizes)  # here, and not for each offer: with thousands of parameters it takes milliseconds
    for mark in sorted({offer.mark for offer in offers}, reverse=True):
        holders: dict[str, list[tuple[Span, int]]] = {name: [] for name in sizes}
        having = [offer for offer in offers if offer.mark == mark]
        for offer in having:
            if offer.structure != structure:
                raise UsageError(
                    f"the state of step {mark.step} does not fit the parameters of the program's models: build the same models in every "
                    "epoch, and give State.resume() the same things in the same order"
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
        f"the state of step {latest.step} (epoch {latest.epoch}) is lost: more workers are gone than there were copies of their state"
    )


def sources(wanted: Span, holders: Sequence[tuple[Span, int]], rank: int) -> list[tuple[Span, int]]:
    """The parts of a span in order, and the rank that gives each part to `rank`: itself if it can, otherwise a holder picked by rank
    number. `holders` must cover the span."""
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
    """The rank to which `rank` entrusts a copy of what it holds: each rank keeps one other rank's copy.

    It is on another node if there are several nodes of equal size: then a whole node may be lost. With nodes of different sizes this is
    true for most ranks.
    """
    world_size = sum(len(node) for node in nodes)
    shift = max(len(node) for node in nodes) if len(nodes) > 1 else 1
    return (rank + shift) % world_size


def replicas(held: Sequence[Mapping[str, Span]]) -> dict[frozenset[int], set[Span]]:
    """What several ranks hold alike, which is entrusted to nobody, by the ranks that hold it. `held`: of each rank what it holds, by
    name."""
    holders: dict[Span, set[int]] = {}
    for rank, spans in enumerate(held):
        for span in spans.values():
            holders.setdefault(span, set()).add(rank)
    found: dict[frozenset[int], set[Span]] = {}
    for span, ranks in holders.items():
        if len(ranks) > 1:
            found.setdefault(frozenset(ranks), set()).add(span)
    return found


def handovers(leaving: Collection[int], nodes: Sequence[Sequence[int]], groups: Iterable[frozenset[int]] = ()) -> list[Handover]:
    """The copies to be made before these ranks leave: see [Note: handing over] in copying.py. `groups`: those of `replicas`.

    A copy goes to a node that has none yet, if there is one, and there to the rank that has taken least.
    """
    staying = [rank for node in nodes for rank in node if rank not in leaving]
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    taken = dict.fromkeys(staying, 0)
    holders: list[tuple[int | frozenset[int], Iterable[int]]] = [(rank, (rank, keeper(rank, nodes))) for rank in sorted(node_of)]
    found = []
    for of, ranks in holders + [(group, group) for group in groups]:
        having = {rank for rank in ranks if rank in taken}
        giver = min(having or ranks)
        while len(having) < min(COPIES, len(staying)):
            has_copy = {node_of[rank] for rank in having}
            taker = min(taken.keys() - having, key=lambda rank: (node_of[rank] in has_copy, taken[rank], rank))
            having.add(taker)
            taken[taker] += 1
            found.append(Handover(giver, taker, of))
    return found
