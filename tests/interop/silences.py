"""Programs in which a rank is silent for a while, with torch's own store and no rendezvous; run by forked ranks."""

# mypy: disable-error-code="no-untyped-call"

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardnet.errors import PeerLost
from tests.interop import programs

NAMED_WITHIN_S = 8.0  # 1.5 x suspect_s, and time for a busy machine; by silence alone it would take lost_s, which is 10 s
HELD_S = 5


def main(folder: str, world_size: str, name: str, token: str = "") -> int:
    """Run one of the programs below on so many ranks, over TLS if there is a token; returns how many failed."""
    os.environ.update({"SHARDNET_TOKEN": token} if token else {})
    return programs.launch(globals()[name], folder, int(world_size))


def frozen(rank: int, world_size: int, folder: Path) -> None:
    """The last rank freezes in backward. For all others `backward` raises an error that names it, though only some of them watch it."""
    pid = folder / "pid"
    if rank == world_size - 1:
        pid.write_text(str(os.getpid()))

    def freeze() -> None:
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    start = time.monotonic()
    try:
        _train(freeze)
    except RuntimeError as error:  # DDP's reducer knows no other
        text = str(error)
        assert PeerLost.__name__ in text, text
        assert f"rank {world_size - 1} (127.0.0.1:" in text, text
        assert "silent" in text, text
        assert "all_reduce #" in text, text
    else:
        raise AssertionError("a frozen rank was not missed")
    took_s = time.monotonic() - start
    assert took_s < NAMED_WITHIN_S, took_s
    dist.distributed_c10d._get_default_store().add("heard", 1)
    if rank == 0:
        while dist.distributed_c10d._get_default_store().add("heard", 0) < world_size - 1:
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGKILL)


def held(rank: int, world_size: int, _: Path) -> None:
    """The first rank watches the last one, and its interpreter is held for longer than a frozen rank is waited for."""

    def hold() -> None:
        if rank == 0:
            ctypes.PyDLL(None).sleep(HELD_S)  # this sleep keeps the GIL, which others release

    _train(hold)
    values = torch.ones(3)
    dist.all_reduce(values)
    assert values.tolist() == [world_size] * 3


def _train(disturb: Callable[[], None]) -> None:
    """Three steps; the second one is disturbed between forward and backward's first sum."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        if step == 1:
            loss.register_hook(lambda _: disturb())
        loss.backward()
