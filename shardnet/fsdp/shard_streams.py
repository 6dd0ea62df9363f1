"""`ShardStreams`: where shards on a GPU are read for a gather.

[Note: gathers ahead] The host runs ahead of a GPU: when a unit's gather starts, the forward of the units before it is still queued on
the computing stream. Started on that stream, the gather would wait for them and overlap with nothing. But a shard changes only between
passes. So it is read on a stream of its own, which waits, at the beginning of a forward, for whatever may have changed shards, and for
nothing else. The gather fills memory that earlier units may still compute with: it writes there only when the computing stream has
finished what was queued when the gather started.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardnet.backend.streams import Event, Stream, current_stream, new_stream, now, using


class ReadShard:
    """One read of a shard: `done` is when its result is there."""

    done: Event = None


class ShardStreams:
    """One stream per device, for one model. On the CPU, where a call is over when it returns, it does nothing."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Stream] = {}

    def changed(self) -> None:
        """The work queued on the current stream may have changed shards: later reads wait for it."""
        for device, stream in self._streams.items():
            stream.wait_stream(current_stream(device))

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadShard]:
        """Within this context shards on that device may be read; afterwards `done` marks the end of the read."""
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
