"""`Channels`: what the ranks of a group send to one another. Those of a source, a target and a tag are a group of two, numbered for
themselves."""

import threading
from typing import TYPE_CHECKING

from shardnet.collectives.any_source import AnySource, Ending
from shardnet.pb import mesh_pb2

if TYPE_CHECKING:
    from shardnet.collectives.group import Group


class Channels:
    """One group's on one rank; they end with it. Any thread."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._lock = threading.Lock()  # over what follows
        self._channels: dict[tuple[int, int, str], Group] = {}
        self._any_sources: dict[str, AnySource] = {}

    def channel(self, source: int, target: int, tag: str) -> "Group":
        """What goes from one rank of the group to another with that tag. Raises what the group has ended with, if it has."""
        with self._lock:
            self._group.check_open()  # under the lock: `end` would miss what is made after it
            if (found := self._channels.get((source, target, tag))) is None:
                members = self._group.members
                pair = tuple(members[rank] for rank in sorted((source, target)))
                purpose = f"send {members[source]} to {members[target]} in {self._group.id:#x}" + (f" as {tag}" if tag else "")
                found = self._channels[source, target, tag] = self._group.board.group(pair, purpose)
            return found

    def any_source(self, tag: str) -> AnySource:
        """What receives with that tag from whichever rank sends first."""
        group = self._group
        channels = {group.members[source]: self.channel(source, group.rank, tag) for source in sorted(group.peers)}
        with self._lock:
            group.check_open()
            if (found := self._any_sources.get(tag)) is None:
                found = self._any_sources[tag] = AnySource(group.board, channels)
                group.board.receivers.append(found)
            return found

    @property
    def incoming(self) -> "list[Group]":
        """Those to this rank."""
        with self._lock:
            return [channel for (_, target, _), channel in self._channels.items() if target == self._group.rank]

    def end(self, error: Ending, ended: mesh_pb2.GroupEnded) -> None:
        """The group has ended: end all of them, here and on the ranks at their other ends."""
        each_ended = mesh_pb2.GroupEnded(rank=ended.rank, detail=ended.detail)
        with self._lock:
            channels, receivers = list(self._channels.values()), list(self._any_sources.values())
        for channel in channels:
            channel.end(error, each_ended)
        for receiver in receivers:
            receiver.end(error)
