"""`Channels`: the sends and receives between the ranks of a group. Those with one source, target and tag are a group of two ranks, with
its own numbers.

[Note: idle channels] A channel is a whole group, and a program may use a new tag for every message. Of the channels in which nothing is
under way and for which nothing has come, a rank therefore keeps only those it has used last. Of the others it keeps no more than their
numbers (`Switchboard.retire`): late messages are still recognised, a rank that asks is answered, and the channel goes on from there when
it is used again. No other rank takes part in that, or notices it.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.collectives.any_source import AnySource, Ending
from shardnet.pb import mesh_pb2

if TYPE_CHECKING:
    import concurrent.futures

    from shardnet.collectives.group import Group
    from shardnet.collectives.operation import Algorithm, Call

KEPT = 512  # idle ones: 3 MB, so that a program may use a few hundred tags in turn without making their channels again

Key = tuple[int, int, str]  # source and target, as the group numbers them, and the tag


@dataclass(slots=True)
class _Channel:
    group: "Group"
    users: int = 0  # callers that may be about to begin something in it


class Channels:
    """Those of one group on one rank; they end with the group. Any thread."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._lock = threading.Lock()  # over what follows
        self._channels: OrderedDict[Key, _Channel] = OrderedDict()  # the channel used last is the last entry
        self._any_sources: dict[str, AnySource] = {}  # by tag; only those that have receives without a source
        self._most: float = 2 * KEPT  # with more channels than this, look for idle ones

    @contextmanager
    def channel(self, source: int, target: int, tag: str) -> "Iterator[Group]":
        """The channel from one rank of the group to another with that tag. Begin something in it, but do not keep it.

        Raises the group's error if the group has ended.
        """
        key = source, target, tag
        with self._lock:
            found = self._use(key)
        try:
            yield found
        finally:
            with self._lock:
                self._leave(key)

    def receive_from_any(self, call: "Call", algorithm: "Callable[[Group], Algorithm]", tag: str) -> "concurrent.futures.Future[int]":
        """Receive with that tag from whichever rank sends first; `algorithm` makes the algorithm for that rank's channel. The future gives
        the global rank of the source; its errors are those of `AnySource.begin`.

        Raises the group's error if the group has ended.
        """
        group = self._group
        with self._lock:
            group.check_open()
            if (receiver := self._any_sources.get(tag)) is None:
                keys = {group.members[source]: (source, group.rank, tag) for source in sorted(group.peers)}
                channels = {rank: self._use(key) for rank, key in keys.items()}
                receiver = self._any_sources[tag] = AnySource(group.board, channels, lambda: self._end_any_source(tag))
            return receiver.begin(call, algorithm)

    def _end_any_source(self, tag: str) -> None:
        """A receive with that tag has a source, or has failed."""
        with self._lock:
            if self._any_sources[tag].end_one():
                del self._any_sources[tag]
                for source in self._group.peers:
                    self._leave((source, self._group.rank, tag))

    @property
    def groups(self) -> "list[Group]":
        """Those that are not retired."""
        with self._lock:
            return [channel.group for channel in self._channels.values()]

    @property
    def incoming(self) -> "list[Group]":
        """Those to this rank."""
        with self._lock:
            return [channel.group for (_, target, _), channel in self._channels.items() if target == self._group.rank]

    def end(self, error: Ending, ended: mesh_pb2.GroupEnded) -> None:
        """The group has ended: end all of them, here and on the ranks at their other ends."""
        each_ended = mesh_pb2.GroupEnded(rank=ended.rank, detail=ended.detail)
        with self._lock:
            channels, receivers = [each.group for each in self._channels.values()], list(self._any_sources.values())
        for channel in channels:
            channel.end(error, each_ended)
        for receiver in receivers:
            receiver.end(error)

    # --- under the lock

    def _use(self, key: Key) -> "Group":
        """The group of a channel, which is not retired before `_leave`."""
        self._group.check_open()  # under the lock: `end` would miss a channel that is made after it
        if (channel := self._channels.get(key)) is None:
            source, target, tag = key
            members = self._group.members
            pair = members[min(source, target)], members[max(source, target)]
            purpose = f"send {members[source]} to {members[target]} in {self._group.id:#x}" + (f" as {tag}" if tag else "")
            title = (f"{tag!r} " if tag else "") + f"from rank {members[source]} to rank {members[target]}"
            channel = self._channels[key] = _Channel(self._group.board.channel(pair, purpose, title))
            if len(self._channels) > self._most:
                self._most = math.inf  # until the loop thread has looked: thousands of channels may be made before it gets to that
                self._group.board.loop.call(self._retire)
        self._channels.move_to_end(key)
        channel.users += 1
        return channel.group

    def _leave(self, key: Key) -> None:
        self._channels[key].users -= 1

    # --- loop thread

    def _retire(self) -> None:
        """Retire the idle channels among the oldest ones. The rest is not looked at again before there are twice as many channels."""
        with self._lock:
            for key in list(self._channels)[:-KEPT]:
                if not self._channels[key].users and self._group.board.retire(self._channels[key].group):
                    del self._channels[key]
            self._most = 2 * max(KEPT, len(self._channels))
