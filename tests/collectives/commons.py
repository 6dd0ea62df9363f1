"""What the tests of one buffer a node gather."""

from collections.abc import Awaitable, Callable, Sequence

import torch

from shardnet.backend import Backend, NodeBuffer
from shardnet.config import KIB, Limits

LIMITS = Limits(chunk_bytes=8 * KIB, window_bytes=32 * KIB, inline_bytes=KIB, eager_bytes=KIB)
ROWS = 5_000
Work = Callable[[Backend], Awaitable[NodeBuffer]]


def gather(rows: int = ROWS, add: float = 0.0) -> Work:
    return lambda rank: rank.all_gather_on_node(torch.full((rows,), rank.rank + add))


def gathered(ranks: int, rows: int = ROWS, add: float = 0.0) -> torch.Tensor:
    return (torch.arange(float(ranks)) + add).repeat_interleave(rows)


def release(buffers: Sequence[NodeBuffer]) -> None:
    for buffer in buffers:
        buffer.release()
