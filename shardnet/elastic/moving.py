"""Bringing pieces from the ranks that have them to those that need them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.elastic.choice import Choice, sources
from shardnet.elastic.generation import plain
from shardnet.errors import ProtocolError, UsageError
from shardnet.state.piece import Piece, Span, join
from shardnet.zero.codec import decode, encode

Tensor = torch.Tensor
BATCH_ELEMENTS = 4 * 2**20  # of parameters that move at once: 48 MiB with Adam's state, twice that on a rank that gets all of it
_ALIGNMENT = 16


async def move(
    backend: Backend, choice: Choice, wanted: Sequence[Mapping[str, Span]], held: Sequence[Piece], sizes: Mapping[str, int]
) -> dict[str, Piece]:
    """Fetch the pieces that this rank wants, by name. A collective. Raises UsageError on all ranks if one of them has pieces that cannot be
    cut, or gets pieces that cannot be joined.

    wanted  for each rank the spans that it wants, by name
    held    what this rank has of the chosen state; the result may share its memory
    """
    me, own = backend.rank, dict[str, list[Piece]]()
    for piece in held:
        own.setdefault(piece.span.name, []).append(piece)
    arrived: dict[str, Piece] = {}
    problem: str | None = None  # of this rank; the others go on until all have been told
    for names in _batches(sizes):
        asked: list[list[Piece]] = [[] for _ in wanted]
        try:
            asked = [[_find(own[span.name], span) for span in _asked(me, choice, rank, spans, names)] for rank, spans in enumerate(wanted)]
        except UsageError as error:
            problem = str(error)
        incoming = await _exchange(backend, [encode(plain(pieces if rank != me else [])) for rank, pieces in enumerate(asked)])
        parts: dict[str, list[Piece]] = {}
        for piece in asked[me]:  # these stay where they are
            parts.setdefault(piece.span.name, []).append(piece)
        for header, payload in incoming:
            for name, start, stop, state in decode(header, payload):
                parts.setdefault(name, []).append(Piece(Span(name, start, stop), state))
        try:
            arrived |= {name: join(sorted(pieces, key=lambda piece: piece.span.start)) for name, pieces in parts.items()}
        except UsageError as error:
            problem = str(error)
    if problems := [told for told in await gather_json(backend, problem, "check that the state moved") if told is not None]:
        raise UsageError(problems[0])
    if missing := [span for name, span in wanted[me].items() if name not in arrived or arrived[name].span != span]:
        raise ProtocolError(f"the pieces from other ranks do not make up {missing[0]}")
    return arrived


async def give_all(backend: Backend, root: int, value: Any) -> Any:
    """Root's value on every rank. A collective."""
    header, payload = encode(value)
    label = "state that is the same on all ranks"
    sizes = (await backend.broadcast(torch.tensor([header.numel(), payload.numel()], device="cpu"), root, label=label)).tolist()
    if backend.rank != root:
        header, payload = (torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes)
    header = await backend.broadcast(header, root, label=label)
    payload = await backend.broadcast(payload, root, label=label)
    return decode(header, payload)


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names of parameters that move together; a parameter that is larger than a batch moves alone."""
    batch: list[str] = []
    elements = 0
    for name, numel in sizes.items():
        if batch and elements + numel > BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(name)
        elements += numel
    if batch:
        yield batch


def _asked(me: int, choice: Choice, rank: int, spans: Mapping[str, Span], names: Sequence[str]) -> list[Span]:
    """The spans that `rank` gets from this rank, `me`."""
    return [span for name in names if name in spans for span, holder in sources(spans[name], choice.holders[name], rank) if holder == me]


def _find(held: Sequence[Piece], span: Span) -> Piece:
    piece = next(each for each in held if each.span.start <= span.start and span.stop <= each.span.stop)
    return piece.cut(span.start, span.stop)


async def _exchange(backend: Backend, outgoing: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Send a header and a payload to each rank, and receive one of each from every rank."""
    label = "state of the last committed step"
    sizes = torch.tensor([[header.numel(), payload.numel()] for header, payload in outgoing], device="cpu")
    expected = await backend.all_to_all(sizes, label=label)
    flat = torch.cat([part for header, payload in outgoing for part in (_padded(header), _padded(payload))])
    send_sizes, recv_sizes = (_up(each).sum(dim=1).tolist() for each in (sizes, expected))
    received = await backend.all_to_all(flat, send_sizes=send_sizes, recv_sizes=recv_sizes, label=label)
    found = []
    for (header, payload), part in zip(expected.tolist(), received.split_with_sizes(recv_sizes), strict=True):
        start = header + -header % _ALIGNMENT
        found.append((part[:header], part[start : start + payload]))
    return found


def _up(sizes: Tensor) -> Tensor:
    return (sizes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _padded(flat: Tensor) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))
