"""Two ranks of one node with little memory to share: the code of a process that a `Nursery` has forked."""

import asyncio
import ctypes
import resource
import subprocess
from functools import partial

import torch

from shardnet.backend import Backend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.testing import each_rank, local_cluster

CLONE_NEWNS = 0x20000

# What fills a /dev/shm of 4096 bytes before the ranks begin.
FULL = "head -c 4096 /dev/zero > /dev/shm/all"
TAKEN = (
    "for name in shardnet shardnet-window shardnet-segment shardnet-mailbox; do "
    "ln -s /etc/passwd /dev/shm/$name.link; touch /dev/shm/$name; chown nobody /dev/shm/$name; chmod 400 /dev/shm/$name; done"
)


def work(shm: str, limit_bytes: str) -> int:
    """Run small collectives, copied ones, and ones in common memory; print with which ranks rank 0 shares memory.

    shm          shell commands that fill a /dev/shm of this process's own; empty: /dev/shm stays as it is
    limit_bytes  limit of a file's size, and so of memory to share; 0: no limit
    """
    if shm:
        if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
            raise OSError("unshare(CLONE_NEWNS) failed")
        own = "mount --make-rprivate / && mount -t tmpfs -o size=4096 none /dev/shm"
        subprocess.run(["sh", "-ec", f"{own}\n{shm}"], check=True, timeout=20)
    if limit := int(limit_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    asyncio.run(_sum())
    return 0


async def _sum() -> None:
    async with local_cluster(2, lending=False) as ranks:
        for rows in (10, 3_000_000, 20_000_000):
            for total in await each_rank(ranks, partial(_reduced, rows)):
                assert torch.equal(total, torch.full((rows,), 3.0))
            for buffer in await each_rank(ranks, partial(_gathered, rows)):
                assert buffer.tensor.sum() == rows
                buffer.release()
        print(sorted(ranks[0].telemetry.memory_peers), flush=True)


async def _reduced(rows: int, rank: Backend) -> torch.Tensor:
    return await rank.all_reduce(torch.full((rows,), rank.rank + 1.0))


async def _gathered(rows: int, rank: Backend) -> NodeBuffer:
    return await rank.all_gather_on_node(torch.full((rows,), float(rank.rank)))
