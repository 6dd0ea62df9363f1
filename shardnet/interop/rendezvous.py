"""`init_method="shardnet://"`: ranks that shardnet's rendezvous places, as `shardnet run` starts them, without torchrun and its store."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import Store

from shardnet.errors import StateError, UsageError
from shardnet.interop.store import WorldStore
from shardnet.interop.world import World

_DEFAULT = timedelta(minutes=30)  # torch's own
_latest: "list[WorldStore]" = []  # one at most; torch holds only the C++ part of a store, and loses the Python object


def rendezvous(url: str, timeout: timedelta = _DEFAULT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch calls this for `shardnet://` and `shardnet://HOST:PORT`, with `rank` and `world_size` if the program gives them. `rank` is a
    wish, `world_size` the number of ranks. Other settings come from the environment, as for `shardnet.connect`.

    Raises the errors of `World.join`.
    """
    for store in _latest:
        store.world.close()  # its group could not be made, or was not one of ours, so that nobody has closed it
    world = World.join(timeout.total_seconds(), _given(url))
    _tell_others(world)
    _latest[:] = [WorldStore(world)]
    yield _latest[0], world.backend.rank, world.backend.world_size
    raise StateError("this rendezvous has already made its world; for another one, call destroy_process_group and init_process_group")


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
        raise UsageError(f"init_method must be shardnet:// or shardnet://HOST:PORT without a path, got {url!r}")
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items() if name in ("rank", "world_size")}
    given: dict[str, object] = {"rendezvous": parts.netloc} if parts.netloc else {}
    if "rank" in query:
        given["wished_rank"] = query["rank"]
    if "world_size" in query:
        given["min_world_size"] = given["max_world_size"] = query["world_size"]
    return given
