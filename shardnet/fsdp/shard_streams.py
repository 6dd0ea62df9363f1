"""`ShardStreams`: where shards on a GPU are read for a gather.

[Note: gathers ahead] The host is ahead of a GPU: when a unit's gather starts, the computing stream has been given the forward of units
before it. Started on that stream, the gather would wait for them, and hide behind nothing. But a shard changes only between passes. So
it is read on a stream of its own, which waits for what may have changed shards, at the beginning of a forward, and for nothing else.
What the gather fills is memory that earlier units may still compute with: that is only written when the computing stream is through
with what it has been given when the gather starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardnet.backend.streams import Event, Stream, current_stream, new_stream, now, using


class ReadShard:
    """One reading: when what it has made of a shard is there."""

    done: Event = None


class ShardStreams:
    """Of one model: one stream a device. On the CPU, where a call is over when it returns, there is nothing to it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream] = {}

    def changed(self) -> None:
        """What the current stream has been given may have changed shards: later readings wait for it."""
        for device, stream in self._streams.items():
            stream.wait_stream(current_stream(device))

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadShard]:
        """Within it shards of that device may be read; `done` has then its end."""
        read = ReadShard()
        if device.type == "cpu":
            yield read
            return
        if device not in self._streams:
            self._streams[device] = new_stream(device)
            self.changed()
        with using(self._streams[device]):
            yield read
            read.done = now(device)
