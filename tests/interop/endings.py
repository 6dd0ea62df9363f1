"""Programs that end a group while something is under way in it; run by ranks that are forked."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, arg-type, union-attr"

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardnet.errors import ClosedError, PeerLost
from tests.interop import programs

SOON_S = programs.TIMEOUT.total_seconds() / 3


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on so many ranks; returns how many failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def unmatched(rank: int, world_size: int, _: Path) -> None:
    """Receives to which nobody sends do not hold up who leaves."""
    group = dist.new_group([0, 1])
    works = [
        dist.irecv(torch.zeros(2), 1 - rank, tag=9),
        dist.irecv(torch.zeros(2), tag=8),
        dist.irecv(torch.zeros(2), 1 - rank, group=group),
    ]
    dist.barrier()
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - start < SOON_S
    for work in works:
        with pytest.raises((ClosedError, PeerLost)):  # the other one's goodbye may have come before
            work.wait()


def sent_before(rank: int, world_size: int, _: Path) -> None:
    """What a rank has sent before it leaves is received by one that asks for it later."""
    if rank == 0:
        dist.isend(torch.full((100_000,), 7.0), 1)
        dist.isend(torch.full((2,), 8.0), 1, tag=5)
        dist.barrier()
        dist.destroy_process_group()
        return
    dist.barrier()
    for size, value, options in ((2, 8.0, {"tag": 5}), (100_000, 7.0, {"src": 0})):
        got = torch.zeros(size)
        assert dist.recv(got, **options) == 0
        assert torch.equal(got, torch.full((size,), value))
