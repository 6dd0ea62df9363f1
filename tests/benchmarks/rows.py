"""Made-up rows of a benchmark run."""

from typing import Any

from benchmarks.plan import Op
from benchmarks.row import Row, Timing
from shardnet.config import MIB


def row(ratio: float = 2.0, **facts: Any) -> Row:
    """Shardnet takes 10 ms and the peer `ratio` times that."""
    defaults = {
        "kind": "collective",
        "op": Op.ALL_GATHER,
        "topology": "one-node",
        "transport": "grpc",
        "ranks": 2,
        "bytes": MIB,
        "peer": "gloo",
        "moved_bytes": MIB,
        "chunk_bytes": MIB,
    }
    return Row.compare(Timing((0.01, 0.01, 0.01), cpu_s=0.25), Timing((0.01 * ratio,) * 3, cpu_s=0.5), **(defaults | facts))


def complete(ratios: dict[Op, float], ranks: int = 2, **facts: Any) -> list[Row]:
    """Every op at every size that counts."""
    return [row(ratio, op=op, bytes=size * MIB, ranks=ranks, **facts) for op, ratio in ratios.items() for size in (1, 16, 64)]
