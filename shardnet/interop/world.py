"""`World`: one process's connections to all other processes of a torch job."""

import os
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardnet.backend import Backend
from shardnet.errors import ClosedError, StateError, UsageError
from shardnet.interop.ends import Ends
from shardnet.interop.meeting import meet
from shardnet.loop import LoopThread
from shardnet.pb.store_pb2 import StoreReply, StoreRequest
from shardnet.rendezvous.identity import new_incarnation
from shardnet.settings import Settings
from shardnet.topology import Topology
from shardnet.training.last_words import LastWords
from shardnet.training.seat import Seat
from shardnet.training.station import Meet, open_station, take_seat
from shardnet.transport.store_service import StoreClient, StoreService

JOB = "torch"  # the job's name if nobody gives one
T = TypeVar("T")
Ask = Callable[[StoreRequest], Coroutine[Any, Any, StoreReply]]
_NOWHERE = "127.0.0.1:1"  # stands for a store that has no address, such as a file: this machine's address towards it is loopback


class World:
    """One port, the connections to all other ranks, and threads for futures; lives as long as torch's default group. Any thread."""

    def __init__(self, seat: Seat, stack: AsyncExitStack, ask: Ask | None = None) -> None:
        """`ask` asks for the keys that rank 0 keeps, if the rendezvous has placed the ranks."""
        self.address = seat.topology.me.address  # host:port at which others reach this rank
        self.pid = os.getpid()  # of the process that is the rank; a fork of it is not
        self.ends = Ends()
        self._seat = seat
        self._stack = stack  # closed after the seat
        self._ask = ask
        self._closed = False

    @classmethod
    def meet(cls, store: Store, rank: int, world_size: int, timeout_s: float) -> Self:
        """Find the others through torch's store, and connect to each. Blocks.

        Raises PeerLost or JoinTimeout, naming the missing ranks; ListenError; CredentialsError or PlaintextRefused if connections
        would not be protected as they must be.
        """
        settings = Settings.from_environment(
            rendezvous=_address(store),
            job=os.environ.get("SHARDNET_JOB") or JOB,
            min_world_size=world_size,
            max_world_size=world_size,
            wished_rank=rank,
            elastic=False,
            report_file="",
        )

        return _wait(cls._open(settings, timeout_s, partial(meet, store, rank, world_size, settings.node, new_incarnation(), timeout_s)))

    @classmethod
    def join(cls, timeout_s: float, given: Mapping[str, object]) -> Self:
        """Find the others through shardnet's rendezvous, which the environment or `given` names as for `shardnet.connect`, and connect to
        each. Blocks. Raises the errors of `shardnet.connect`, and UsageError for an elastic job."""
        settings = Settings.from_environment(None, **given)
        if settings.elastic:
            raise UsageError(
                "a torch process group has the same ranks from its beginning to its end, but this job is elastic; start it without "
                "--min-workers and --restarts, or train with shardnet.elastic"
            )
        return _wait(cls._open(settings, timeout_s))

    @classmethod
    async def _open(cls, settings: Settings, timeout_s: float, meet: Meet | None = None) -> Self:
        timeouts = replace(settings.timeouts, collective_s=timeout_s, connect_s=min(settings.timeouts.connect_s, timeout_s))
        settings = replace(settings, timeouts=timeouts)
        keys = StoreService(settings.job) if meet is None else None
        async with AsyncExitStack() as stack:
            station = await stack.enter_async_context(open_station(settings, meet, keys))
            seat = await take_seat(station, settings)
            try:
                ask = None if keys is None else _asking(keys, seat.topology, settings, stack)
            except BaseException as error:
                await seat.leave(LastWords.of(error))
                raise
            return cls(seat, stack.pop_all(), ask)
        raise AssertionError("unreachable: the stack hides no error")

    def ask_store(self, request: StoreRequest) -> StoreReply:
        """Send a request about the keys that rank 0 keeps. Blocks; raises as `StoreClient.ask`, or ClosedError."""
        if self._closed:
            raise ClosedError("this process has left the world that this store belongs to")
        if self._ask is None:
            raise StateError("this world has no store of its own, because its ranks have met through a store of torch's; use that store")
        return _wait(self._ask(request))

    @property
    def topology(self) -> Topology:
        return self._seat.topology

    @property
    def backend(self) -> Backend:
        return self._seat.backend

    def close(self) -> None:
        """Finish running collectives, say goodbye to the other ranks, close the port. Safe to call again."""
        self._end(None)

    def abort(self, why: str = "its program has aborted the process group") -> None:
        """Fail running collectives, and close at once, without a goodbye. Safe to call again."""
        self.backend.abort(why)  # also while a `close` in another thread waits for something
        self._end(LastWords(why))

    def give_up(self, words: LastWords) -> None:
        """At the end of the process: tell the others why, which takes a moment at most, and leave the rest to the system."""
        _wait(self._seat.leave(words))

    def _end(self, words: LastWords | None) -> None:
        if not self._closed:
            self._closed = True
            _wait(self._leave(words))
            self.ends.shutdown(wait=False)  # this may run in a callback on one of these threads

    async def _leave(self, words: LastWords | None) -> None:
        async with self._stack:
            await self._seat.leave(words)


def _asking(keys: StoreService, topology: Topology, settings: Settings, stack: AsyncExitStack) -> Ask:
    """The function with which this rank asks for keys, until the stack ends."""
    if topology.rank == 0:
        keys.open(topology.epoch)
        stack.callback(keys.close)
        return keys.ask
    client = StoreClient(topology.members[0], settings.security(), settings.timeouts, settings.limits)
    stack.push_async_callback(client.aclose)
    return client.ask


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on shardnet's loop, from any other thread, and wait for it. Ctrl-C cancels it."""
    running: Future[T] = LoopThread.shared().run(coroutine)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def _address(store: Store) -> str:
    """The address of the store; others can reach this rank at this machine's address towards the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{_bracketed(store.host)}:{store.port}" if isinstance(store, TCPStore) else _NOWHERE


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
