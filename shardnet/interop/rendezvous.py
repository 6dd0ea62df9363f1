"""`init_method="shardnet://"`: ranks that shardnet's rendezvous places, as `shardnet run` starts them, rather than torch's store."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import PrefixStore, Store

from shardnet.errors import StateError, UsageError
from shardnet.interop.world import World

_DEFAULT = timedelta(minutes=30)  # torch's own
_latest: "list[PlacedStore]" = []  # one at most; torch holds only what lies below Python of a store, and forgets whose it is


class PlacedStore(Store):
    """In place of torch's store, where nobody needs one to be found: holds the world that the rendezvous has made.

    torch keeps a store for every group, but asks it for nothing once the ranks have met. Who does gets an error rather than a wait that
    would not end.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "init_process_group(init_method='shardnet://') has no torch store; a program that needs one starts with torchrun, "
            "or gives `store` to init_process_group"
        )

    get = set = add = check = wait = append = compare_set = delete_key = multi_get = multi_set = _refuse

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here takes time."""


def placed_world(store: Any) -> World | None:
    """The world that a rendezvous has made already, where torch hands that store on."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.world if isinstance(store, PlacedStore) else None


def rendezvous(url: str, timeout: timedelta = _DEFAULT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """What torch calls for `shardnet://` and `shardnet://HOST:PORT`, with `rank` and `world_size` where the program gives them: a wish, and
    the number of ranks. What is left open comes from the environment, as for `shardnet.connect`.

    Raises what `World.join` does.
    """
    world = World.join(timeout.total_seconds(), _given(url))
    _tell_others(world)
    _latest[:] = [PlacedStore(world)]
    yield _latest[0], world.backend.rank, world.backend.world_size
    raise StateError("a world is met once; destroy_process_group and init_process_group make another")


def _tell_others(world: World) -> None:
    """Set what torchrun would have set: frameworks look there before they ask torch whether they are alone."""
    me, ranks = world.topology.me, world.topology.node_ranks(world.topology.me.node_group)
    os.environ |= {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(world.topology.world_size),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
    }


def _given(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise UsageError(f"init_method {url!r}: there is nothing behind shardnet://HOST:PORT")
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items() if name in ("rank", "world_size")}
    given: dict[str, object] = {"rendezvous": parts.netloc} if parts.netloc else {}
    if "rank" in query:
        given["wished_rank"] = query["rank"]
    if "world_size" in query:
        given["min_world_size"] = given["max_world_size"] = query["world_size"]
    return given
