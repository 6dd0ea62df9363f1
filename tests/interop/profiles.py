"""What torch's profiler shows of collectives; run by forked ranks."""

# mypy: disable-error-code="no-untyped-call, union-attr"

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.interop import programs

LATE_S = 0.3


def main(folder: str, world_size: str, name: str) -> int:
    return programs.launch(globals()[name], folder, int(world_size))


def shown(profiled: profile) -> dict[str, tuple[int, float]]:
    """How often each name is shown, and for how many seconds."""
    events = [event for event in profiled.key_averages() if event.key.startswith("shardnet")]
    return {event.key: (event.count, event.cpu_time_total / 1e6) for event in events}


def plain(rank: int, world_size: int, _: Path) -> None:
    """One collective whose other rank is late, and one that is over before anybody asks."""
    dist.barrier()
    if rank:
        time.sleep(LATE_S)  # this lateness is what is measured
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), src=1)
        dist.barrier()
    else:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            dist.all_reduce(torch.ones(4))
            work = dist.broadcast(torch.ones(4), src=1, async_op=True)
            while not work.is_completed():
                time.sleep(0.001)
            work.wait()
        dist.barrier()
        spans = shown(profiled)
        assert {name: count for name, (count, _) in spans.items()} == {
            "shardnet:all_reduce": 1,
            "shardnet: wait for all_reduce": 1,
            "shardnet:broadcast": 1,
        }
        assert LATE_S / 2 < spans["shardnet: wait for all_reduce"][1] < 10.0


def ddp(rank: int, world_size: int, _: Path) -> None:
    """No Python code waits for its works."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        for _step in range(3):
            model(torch.ones(2, 8)).sum().backward()
    assert shown(profiled)["shardnet:all_reduce"][0] == 3


def unfinished(rank: int, world_size: int, _: Path) -> None:
    """The profiler stops while a collective is under way."""
    if rank == 0:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4))
