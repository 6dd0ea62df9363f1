"""How the ranks of a torch job find each other: each writes its address to torch's store.

The entries are text, and are only read. Anybody who reaches the port of torch's store can write to it. So protection comes from the
certificates when the connections are made; without certificates the network must be trusted.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import ParamSpec, TypeVar

from torch._C._distributed_c10d import Store

from shardnet.errors import HandshakeError, JoinTimeout, ProtocolError
from shardnet.rendezvous.identity import node_identity
from shardnet.topology import Member, Topology

_COUNT = "shardnet/ranks"  # how many came and did not give up: one store may serve several worlds of the same ranks, one after the other
_PAUSE_S = 0.02
_GONE = "gone"  # instead of the card of a rank that has given up
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank leaves for the others."""

    address: str
    node: str
    incarnation: str
    identity: str

    @classmethod
    def read(cls, rank: int, text: bytes) -> "_Card":
        try:
            said = json.loads(text)
            return cls(**{name: str(said[name]) for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"rank {rank}'s entry in torch's store is not one of this version of shardnet; run the same version on all ranks"
            ) from error


async def meet(
    store: Store, rank: int, world_size: int, node: str, incarnation: str, timeout_s: float, address: str, identity: str
) -> Topology:
    """The ranks and their addresses, once all ranks have come. `node` names this machine; empty: found. Raises JoinTimeout naming the
    missing ranks, and HandshakeError if some have certificates and others have none."""
    world = await _ask(store.add, _COUNT, 1)
    number = (world - 1) // world_size
    mine = _Card(address, node_identity(node), incarnation, identity)
    await _ask(store.set, _key(number, rank), json.dumps(asdict(mine)))
    try:
        cards = await _cards(store, number, world_size, timeout_s)
    except BaseException:
        with suppress(RuntimeError):  # perhaps the store itself has failed
            # Later ranks would look for this one where it no longer is. Not deleted: a rank that has just seen the key would wait for it.
            await _ask(store.set, _key(number, rank), _GONE)
            await _ask(store.add, _COUNT, -1)  # if it comes again it belongs to this world
        raise
    _check_protection(cards)
    return Topology(number + 1, rank, _placed(cards))


async def _cards(store: Store, number: int, world_size: int, timeout_s: float) -> list[_Card]:
    gives_up_s = time.monotonic() + timeout_s
    cards: dict[int, _Card] = {}
    while True:
        missing = [rank for rank in range(world_size) if rank not in cards]
        keys = [_key(number, rank) for rank in missing]
        if await _ask(store.check, keys):  # about all at once: one store serves the requests of all ranks
            at_once = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stub
            said = await _ask(store.multi_get, keys) if at_once else [await _ask(store.get, key) for key in keys]
            cards |= {rank: _Card.read(rank, text) for rank, text in zip(missing, said, strict=True) if text != _GONE.encode()}
        if len(cards) == world_size:
            return [cards[rank] for rank in range(world_size)]
        if time.monotonic() >= gives_up_s:
            there = [await _ask(store.check, [key]) and await _ask(store.get, key) != _GONE.encode() for key in keys]
            names = ", ".join(str(rank) for rank, is_there in zip(missing, there, strict=True) if not is_there)
            if not names:
                continue  # the last ones have come meanwhile
            raise JoinTimeout(f"ranks {names} of {world_size} have not joined within {timeout_s:g} s; check that their processes run")
        await asyncio.sleep(_PAUSE_S)  # the store itself can wait, but such a wait cannot be cancelled


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def _check_protection(cards: list[_Card]) -> None:
    """All ranks see the same cards, so either all fail here or none."""
    plain = [rank for rank, card in enumerate(cards) if not card.identity]
    if plain and len(plain) < len(cards):
        raise HandshakeError(
            f"{_ranks(plain)} neither certificates nor a join token, but the other ranks have; give every process the same "
            "SHARDNET_TOKEN or a certificate of the same authority (SHARDNET_CERTS), or start all processes without either"
        )


def _placed(cards: list[_Card]) -> tuple[Member, ...]:
    """The members by rank; nodes are numbered in the order of their lowest ranks."""
    nodes = list(dict.fromkeys(card.node for card in cards))
    seen = dict.fromkeys(nodes, 0)
    members = []
    for rank, card in enumerate(cards):
        members.append(Member(rank, seen[card.node], nodes.index(card.node), card.address, card.node, card.incarnation, card.identity))
        seen[card.node] += 1
    return tuple(members)


def _key(number: int, rank: int) -> str:
    return f"shardnet/world {number}/rank {rank}"


async def _ask(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a method of the store, which blocks, on a thread."""
    return await asyncio.to_thread(call, *arguments, **options)
