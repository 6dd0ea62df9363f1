"""`Told`: what the ranks of a new epoch tell each other about earlier epochs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.elastic.choice import Offer
from shardnet.elastic.generation import Generation, Mark
from shardnet.state import Span


@dataclass(frozen=True, slots=True)
class Told:
    """The same on all ranks."""

    offers: list[Offer]
    wanted: list[dict[str, Span]]  # of each rank, by name
    witness: int | None  # the first rank that was in an epoch before; None: all are new

    @classmethod
    async def by_all(cls, backend: Backend, generations: Iterable[Generation], wanted: Mapping[str, Span], *, was_there: bool) -> "Told":
        """Exchange which generations each rank has, which spans it wants, and whether it was in an epoch before. A collective."""
        mine = {
            "offers": [_pack_offer(each) for each in generations],
            "wanted": [_pack_span(span) for span in wanted.values()],
            "was_there": was_there,
        }
        said = await gather_json(backend, mine, "surviving state")
        return cls(
            offers=[_unpack_offer(rank, offer) for rank, each in enumerate(said) for offer in each["offers"]],
            wanted=[{name: Span(name, start, stop) for name, start, stop in each["wanted"]} for each in said],
            witness=next((rank for rank, each in enumerate(said) if each["was_there"]), None),
        )


def _pack_offer(generation: Generation) -> dict[str, Any]:
    structure = generation.local.value()["structure"]
    return {"mark": generation.mark, "structure": structure, "spans": [_pack_span(piece.span) for piece in generation.pieces()]}


def _unpack_offer(rank: int, offer: dict[str, Any]) -> Offer:
    return Offer(rank, Mark(*offer["mark"]), offer["structure"], tuple(Span(*span) for span in offer["spans"]))


def _pack_span(span: Span) -> tuple[str, int, int]:
    return span.name, span.start, span.stop
