"""Measure how much a checkpoint slows down the training while it is written: `shardnet run --nproc 2 benchmarks/saving.py DIR`.

Steps without a save and steps during a save take turns. The time that the training waits for the copy is printed by itself.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import shardnet
from shardnet.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))

from gpt import GPT, Block, GPTConfig

BATCH, CONTEXT = 4, 128


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where checkpoints go; on the disk that is to be measured")
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a round, each way (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    async with shardnet.connect() as cluster:
        model = await cluster.shard(GPT(GPTConfig(512, 8, 8, CONTEXT, 0)), units=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        checkpoints = Checkpoints(cluster.backend, options.folder, model, optimizer, keep=1)

        async def step() -> float:
            started_s = time.perf_counter()
            tokens = torch.randint(256, (BATCH, CONTEXT))
            logits = await model(tokens)
            await model.backward(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
            await model.step(optimizer)
            optimizer.zero_grad()
            return time.perf_counter() - started_s

        for _ in range(2):
            await step()  # creates buffers and Adam's state
        alone, beside, begun, written = list[float](), list[float](), list[float](), list[float]()
        for number in range(options.rounds):
            alone += [await step() for _ in range(options.steps)]
            started_s = time.perf_counter()
            await checkpoints.save(number)
            begun.append(time.perf_counter() - started_s)
            while checkpoints.is_saving:
                beside.append(await step())
            written.append(time.perf_counter() - started_s)
            await checkpoints.wait()
        if cluster.rank == 0:
            usual, meanwhile = statistics.median(alone), statistics.median(beside)
            print(f"{cluster.world_size} ranks, checkpoint of {size_of(Path(options.folder)) / 2**20:.0f} MiB")
            print(
                f"step {1e3 * usual:.0f} ms, {1e3 * meanwhile:.0f} ms while one is written ({meanwhile / usual:.3f} x, {len(beside)} steps)"
            )
            print(f"the training waits {1e3 * statistics.median(begun):.0f} ms; written within {statistics.median(written):.2f} s")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("step-*/*"))


shardnet.run(main)
