"""`WorldStore`: torch's store if shardnet's rendezvous has placed the ranks. Rank 0 keeps it; the others ask through its port."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shardnet.interop.world import World
from shardnet.pb.store_pb2 import StoreReply, StoreRequest
from shardnet.uncompiled import uncompiled

_NO_LIMIT_S = 1e6  # stands for no limit, for which torch writes zero


@uncompiled
class WorldStore(Store):
    """Holds the world that the rendezvous has made, and lives as long as that is used. Any thread except shardnet's own; each call blocks.

    Raises DistStoreError, as torch's stores do, if keys do not come in time; for everything else shardnet's errors, which are also
    RuntimeErrors. Methods have the names by which torch calls them from C++ and from Python.
    """

    timeout: timedelta  # within which keys must come; torch's own attribute, like `set_timeout`

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def set(self, key: str, value: Any) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ask(set=StoreRequest.Entries(keys=keys, values=map(_as_bytes, values)))

    def append(self, key: str, value: Any) -> None:
        self._ask(append=StoreRequest.Entries(keys=[key], values=[_as_bytes(value)]))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(self.timeout, get=StoreRequest.Keys(keys=keys)).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(self.timeout if timeout is None else timeout, wait=StoreRequest.Keys(keys=keys))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(check=StoreRequest.Keys(keys=keys)).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask(add=StoreRequest.Sum(key=key, amount=amount)).number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        exchange = StoreRequest.Exchange(key=key, expected=_as_bytes(expected), desired=_as_bytes(desired))
        return self._ask(exchange=exchange).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(delete=StoreRequest.Keys(keys=[key])).number)

    def num_keys(self) -> int:
        return self._ask(count=True).number

    deleteKey = delete_key  # noqa: N815 - torch's names, from below
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Whether it has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> "WorldStore":
        """Itself: threads may share it."""
        return self

    def _ask(self, within: timedelta = timedelta(0), **what: Any) -> StoreReply:
        within_s = within.total_seconds() or _NO_LIMIT_S
        waits = "get" in what or "wait" in what
        reply = self.world.ask_store(StoreRequest(epoch=self.world.topology.epoch, within_s=within_s if waits else 0.0, **what))
        if reply.missing:
            raise dist.DistStoreError(f"no rank has set {', '.join(map(repr, reply.missing))} within {within_s:g} s")
        return reply


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def placed_world(store: Any) -> World | None:
    """The world that a rendezvous has made already, if torch hands on its store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.world if isinstance(store, WorldStore) else None
