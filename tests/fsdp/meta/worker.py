"""A process whose peak memory shows that building on meta holds no whole model: prints by how many bytes it grew."""

from pathlib import Path

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from tests.fsdp.ranks import run_ranks

WORLD_SIZE = 4
LAYERS, WIDTH = 32, 1024
UNIT_BYTES = WIDTH * (WIDTH + 1) * 4
MODEL_BYTES = LAYERS * UNIT_BYTES


def make(layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def peak_bytes() -> int:
    """The peak of resident memory since this program began; `ru_maxrss` would include that of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    def work(backend: Backend, layers: int = LAYERS) -> FSDP:
        return FSDP(make(layers), backend, units=[nn.Linear])

    run_ranks(WORLD_SIZE, lambda backend: work(backend, 1))  # so that what the libraries themselves take for good does not count
    before = peak_bytes()
    models = run_ranks(WORLD_SIZE, work)  # kept alive with their shards, which together are one model
    print(peak_bytes() - before, len(models))


if __name__ == "__main__":
    main()
