"""Measure what it costs workers to be watched: `shardnet run --nproc 16 benchmarks/watching.py`.

Equally long periods with and without a stream of statistics from every rank take turns. The ranks do the same, very little, in both. A
separate process reads the streams; its CPU time does not count.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from contextlib import aclosing

import torch

import shardnet
from shardnet.transport.watching import watch


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round, each way (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from one snapshot to the next (default: %(default)s)")
    parser.add_argument("--watch", nargs="+", default=(), metavar="ADDRESS", help="be the one who watches, until stdin ends")
    options = parser.parse_args()
    if options.watch:
        await look_on(options.watch, options.interval)
        return
    torch.set_num_threads(1)
    async with shardnet.connect() as cluster:
        addresses = [member.address for member in cluster.topology.members]
        alone, watched, told = list[float](), list[float](), 0

        async def round_s() -> float:
            """CPU seconds that all ranks together use per second."""
            await cluster.backend.barrier()
            started_s, used_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(options.seconds)
            mine = (time.process_time() - used_s) / (time.perf_counter() - started_s)
            return float(await cluster.mean(mine)) * cluster.world_size

        for _ in range(3):
            cluster.report(step=cluster.telemetry.step + 1)  # so that snapshots have some content
            await cluster.mean(1.0)
        for _ in range(options.rounds):
            alone.append(await round_s())
            reader = await start_watching(addresses, options.interval) if cluster.rank == 0 else None  # the other ranks wait at the barrier
            watched.append(await round_s())
            if reader is not None:
                told += int((await reader.communicate(b""))[0])
        if cluster.rank == 0:
            cost, idle = statistics.median(watched) - statistics.median(alone), statistics.median(alone)
            print(f"{cluster.world_size} ranks, a snapshot of each every {options.interval:g} s; {told} received")
            print(f"all ranks together: {idle:.2%} of a core, {cost:.2%} more while watched ({cost / cluster.world_size:.3%} a rank)")
            print(f"rounds, alone: {', '.join(f'{each:.2%}' for each in alone)}; watched: {', '.join(f'{each:.2%}' for each in watched)}")


async def start_watching(addresses: list[str], interval_s: float) -> asyncio.subprocess.Process:
    command = (sys.executable, __file__, "--interval", str(interval_s), "--watch", *addresses)
    reader = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    await reader.stdout.readline()
    return reader


async def look_on(addresses: list[str], interval_s: float) -> None:
    """Read a stream from each address; print a line when all have begun, and at the end how many snapshots came."""
    told, begun = Counter[str](), asyncio.Event()

    async def read(address: str) -> None:
        async with aclosing(watch(address, interval_s=interval_s)) as snapshots:
            async for _ in snapshots:
                told[address] += 1
                if len(told) == len(addresses) and not begun.is_set():
                    begun.set()
                    print("all have begun", flush=True)

    readers = [asyncio.create_task(read(address)) for address in addresses]
    await asyncio.to_thread(sys.stdin.read)
    for each in readers:
        each.cancel()
    await asyncio.wait(readers)
    print(told.total())


shardnet.run(main)
