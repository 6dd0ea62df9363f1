"""A training without a step, to time how long it takes to start and end: `time shardnet run --nproc 4 benchmarks/starting.py`."""

import torch
from torch import nn

import shardnet


async def main() -> None:
    async with shardnet.connect() as cluster:
        model = await cluster.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        torch.optim.AdamW(model.parameters())


if __name__ == "__main__":
    shardnet.run(main)
