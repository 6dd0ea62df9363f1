"""init_method="shardnet://": ranks placed by shardnet's own rendezvous. They are forked where it does not matter what starts them."""

import asyncio
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from shardnet.errors import JoinRefused, UsageError
from shardnet.interop.rendezvous import rendezvous
from shardnet.interop.world import World
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.server import RendezvousServer
from shardnet.settings import Settings
from shardnet.training import station
from shardnet.training.seat import Seat
from shardnet.training.station import take_seat
from tests.interop.sessions import run
from tests.interop.test_docs import PAGE
from tests.training.programs import run_program
from tests.training.workers import Nursery

PROGRAM = """
import os
import torch, torch.distributed as dist
for epoch in range(2):
    dist.init_process_group("shardnet", init_method="shardnet://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert (rank, ranks) == (int(os.environ["SHARDNET_LOCAL_RANK"]), 3)
    values = torch.ones(3) * rank
    dist.all_reduce(values)
    assert values.tolist() == [3.0] * 3
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(values, group=pair)
        assert values.tolist() == [6.0] * 3
    print(f"rank {rank} answers at {dist.group.WORLD.address}", flush=True)
    dist.destroy_process_group()
"""


def launched(folder: Path, text: str, *options: str) -> "tuple[int, str, str]":
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-m", "shardnet.cli", "run", "--nproc", "3", *options, "program.py"]
    ended = run(command, folder, 55.0)
    return ended.returncode, ended.stdout, ended.stderr


def test_again_and_again(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out = run_program(nursery, tmp_path, "run", "--nproc", "3", "program.py")
    found = re.findall(r"rank (\d) answers at 127\.0\.0\.1:(\d+)", out)
    ports = {rank: [port for each, port in found if each == rank] for rank in "012"}
    for epoch in range(2):  # the system may give a rank the port that it had before, or another rank had
        assert len({of[epoch] for of in ports.values()}) == 3, "each rank has one port"
    assert [len(of) for of in ports.values()] == [2, 2, 2]


def test_the_program_of_the_page(nursery: Nursery, tmp_path: Path) -> None:
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    plain = 'dist.init_process_group("shardnet")'
    assert plain in found[1]
    told = 'dist.init_process_group("shardnet", init_method="shardnet://")'
    (tmp_path / "program.py").write_text(found[1].replace(plain, told))
    out = run_program(nursery, tmp_path, "run", "--nproc", "2", "program.py")
    assert len([line for line in out.splitlines() if "step" in line]) == 2


STORE = """
import threading, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:shardnet", init_method="shardnet://")  # gloo finds its peers in the store
rank, ranks = dist.get_rank(), dist.get_world_size()
values = torch.ones(3) * rank
dist.all_reduce(values)
assert values.tolist() == [3.0] * 3
store = dist.PrefixStore("program", dist.distributed_c10d._get_default_store())
store.set(f"from {rank}", bytes([rank, 255]))
assert [store.get(f"from {each}") for each in range(ranks)] == [bytes([each, 255]) for each in range(ranks)]
store.add("came", 1)
while store.add("came", 0) < ranks:
    time.sleep(0.01)
assert store.check(["came"]) and not store.check(["came", "gone"])
assert store.compare_set(f"mine {rank}", "", "new") == b"new" == store.compare_set(f"mine {rank}", "old", "newer")
store.append(f"mine {rank}", "er")
assert store.multi_get([f"mine {rank}", "came"]) == [b"newer", b"3"]
store.multi_set([f"one of {rank}", f"two of {rank}"], ["1", "2"])
store.wait([f"two of {rank}"])
assert store.delete_key(f"two of {rank}") and not store.delete_key(f"two of {rank}")
assert store.has_extended_api() and store.clone().get(f"one of {rank}") == b"1" and store.num_keys() > 0
try:
    store.wait(["never"], timedelta(seconds=0.1))
except dist.DistStoreError as error:
    assert "no rank has set 'default_pg/0//program/never' within 0.1 s" in str(error), error
store.set_timeout(timedelta(seconds=0.2))
try:
    store.get("never")
except dist.DistStoreError as error:
    assert "within 0.2 s" in str(error), error
store.set_timeout(timedelta(seconds=20))
late = threading.Timer(0.1, store.set, [f"late for {(rank + 1) % ranks}", "here"])
late.start()
assert store.get(f"late for {rank}") == b"here"
late.join()
dist.barrier()
dist.destroy_process_group()
try:
    store.set("after", "all")
except RuntimeError as error:
    assert "has left the world" in str(error), error
print("as stores are", flush=True)
"""


def test_torch_has_a_store_there(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STORE)
    assert run_program(nursery, tmp_path, "run", "--nproc", "3", "program.py").count("as stores are") == 3


def test_a_rank_that_dies_is_named_to_who_waits_for_it(tmp_path: Path) -> None:
    text = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("shardnet", init_method="shardnet://")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(3))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    raise
"""
    status, out, err = launched(tmp_path, text)
    assert status != 0
    assert "rank 1" in err
    assert "SIGKILL" in err
    assert not out or "rank 1" in out, "the launcher may end the others before they have said it"


def test_a_frozen_rank_is_named_soon(tmp_path: Path) -> None:
    """By silence alone it would take 10 s, but the rendezvous is the second witness. The launcher need not wait for the frozen rank."""
    text = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("shardnet", init_method="shardnet://")
dist.barrier()
began_s = time.monotonic()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    dist.all_reduce(torch.ones(3))
except Exception as error:
    assert "rank 1" in str(error) and "silent" in str(error), error
    print(f"after {time.monotonic() - began_s:.1f} s", flush=True)
    os._exit(7)
"""
    status, out, err = launched(tmp_path, text, "--grace", "1")
    assert status == 7, err
    found = [float(each) for each in re.findall(r"after ([\d.]+) s", out)]
    assert found, "the launcher lets who fails first say why"
    assert max(found) < 9.0


def test_elastic_jobs_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text('import torch.distributed as dist\ndist.init_process_group("shardnet", init_method="shardnet://")')
    told = "a torch process group has the same ranks from its beginning to its end, but this job is elastic"
    with pytest.raises(AssertionError, match=rf"(?s)ended with 3:.*{told}"):  # all three fail
        run_program(nursery, tmp_path, "run", "--nproc", "3", "--min-workers", "1", "program.py")


class Crowded:
    """A station whose rendezvous refuses it several times."""

    elastic = False

    def __init__(self, *refusals: str) -> None:
        self._refusals = list(refusals)
        self.asked = 0

    async def join(self, after: object = None, missing: object = ()) -> Seat:
        self.asked += 1
        if self._refusals:
            raise JoinRefused("the job runs already", self._refusals.pop(0))
        return object.__new__(Seat)


async def test_who_was_in_a_world_before_waits_until_the_others_have_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station, "_left", set())
    settings = Settings(rendezvous="127.0.0.1:7000", job="again")
    for early in (Crowded(Refusal.RUNNING), Crowded(Refusal.FULL)):
        with pytest.raises(JoinRefused):
            await take_seat(early, settings)
        assert early.asked == 1, "a stranger to the job is told at once"
    station._left.add((settings.rendezvous, settings.job))
    late = Crowded(Refusal.RUNNING, Refusal.FULL, Refusal.RUNNING)
    await take_seat(late, settings)
    assert late.asked == 4
    ended = Crowded(Refusal.ENDED)
    with pytest.raises(JoinRefused):
        await take_seat(ended, settings)
    assert ended.asked == 1
    hurried = replace(settings, timeouts=replace(settings.timeouts, join_s=0.01))
    with pytest.raises(JoinRefused):
        await take_seat(Crowded(*[Refusal.RUNNING] * 100), hurried)


NOT_MADE = """
import torch.distributed as dist

def broken(*_):
    raise RuntimeError("no such device")

dist.Backend.register_backend("broken", broken, devices=["cpu"])
for name in ("broken", "broken", "shardnet", "gloo", "shardnet"):
    try:
        dist.init_process_group(name, init_method="shardnet://")
    except RuntimeError as error:
        assert name == "broken" and "no such device" in str(error), error
    else:
        dist.barrier()
        dist.destroy_process_group()
print("met in the end", flush=True)
"""


def test_a_group_that_could_not_be_made_is_in_nobodys_way(tmp_path: Path) -> None:
    """Nor is a group of another backend, which has met in our store and does not close it."""
    status, out, err = launched(tmp_path, NOT_MADE)
    assert status == 0, err
    assert out.count("met in the end") == 3


@pytest.mark.parametrize("peaceful", [True, False])
async def test_only_a_group_that_was_destroyed_has_ended_in_peace(peaceful: bool) -> None:
    ended = threading.Event()
    async with RendezvousServer("127.0.0.1:0", on_done=ended.set) as server:
        given = {"rendezvous": server.address, "min_world_size": 1, "max_world_size": 1}
        first = await asyncio.to_thread(World.join, 20.0, given)
        await asyncio.to_thread(first.close if peaceful else first.abort)
        await asyncio.to_thread(first.abort)  # nothing any more
        second = await asyncio.to_thread(World.join, 20.0, given)  # by then the rendezvous has heard of the first one's end
        assert ended.is_set() == peaceful
        await asyncio.to_thread(second.abort)


def test_a_world_of_one_needs_no_rendezvous() -> None:
    dist.init_process_group("shardnet", init_method="shardnet://", world_size=1, rank=0)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_what_is_wished_for_is_asked_of_the_rendezvous() -> None:
    with pytest.raises(
        UsageError, match=r"min_world_size of connect\(\) asks for 3 workers, but without SHARDNET_RENDEZVOUS they cannot meet"
    ):
        next(rendezvous("shardnet://?rank=1&world_size=3"))
    with pytest.raises(UsageError, match="shardnet://HOST:PORT without a path, got"):
        next(rendezvous("shardnet://127.0.0.1:1/job"))
    with pytest.raises(UsageError, match="rendezvous of connect"):
        next(rendezvous("shardnet://127.0.0.1"))
