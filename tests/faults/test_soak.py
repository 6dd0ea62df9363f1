"""Minutes of real trouble: `make faults`. With ARGS=-s each test prints its progress. SEED determines everything."""

import asyncio
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.testing import local_cluster
from tests.contract.programs import Runner, random_step
from tests.faults.ledger import scenario
from tests.training.workers import Nursery, Worker, begin, rendezvous

pytestmark = pytest.mark.faults

SEED = 20_240_501
ROUNDS = 60
NODES = {"one node": "aaa", "two nodes": "aabb"}  # by process
# Rounds of 8 collectives: 10,000 collectives after a warm-up, which takes longer on two nodes. There fewer of the groups have ranks that
# share memory, so it takes more rounds until their buffers are as large as they get (90 s in all).
SOAK_ROUNDS = {"one node": 1880, "two nodes": 5640}
GROWS_BY_LESS = {"descriptors": 2, "tasks": 4, "memfd_mappings": 4, "memfd_descriptors": 2, "shm_names": 1}
HEARD_WITHIN_S = 10.0
KIB = 1024
MIB = 1024 * KIB


def test_every_survivor_of_every_killed_worker_names_it(nursery: Nursery) -> None:
    """The survivors go on to the next round in the same process, so if one round breaks something, the next one notices."""
    rng = random.Random(SEED)
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(3)]
        for number in range(ROUNDS):
            begin(workers, job=f"round {number}", work="stream", seed=rng.randrange(10**6), rows=rng.choice((100, 10_000, 100_000)))
            victim = rng.choice(workers)
            how = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))  # at once, or after its own clean-up
            wait_s = rng.uniform(0.0, 0.5)
            time.sleep(wait_s)  # no synchronisation: any moment will do
            killed_s = victim.signal(how)
            workers.remove(victim)
            said = [survivor.hear("left", skip="streaming", within_s=HEARD_WITHIN_S) for survivor in workers]
            context = f"round {number}: {how.name} to rank {victim.rank}: {said}"
            assert all(each["error"] == "PeerLost" and each["leaks"] == [] for each in said), context
            assert all(each["lost"] == victim.rank for each in said), context  # nobody blames the other survivor
            noticed_s = max(each["failed_s"] for each in said) - killed_s
            assert victim.end() == (-how if how is signal.SIGKILL else 128 + how)
            workers.append(stack.enter_context(Worker(nursery, address)))
            print(f"round {number}: {how.name} to rank {victim.rank} after {wait_s:.2f} s, noticed after {noticed_s:.3f} s", flush=True)
        assert [worker.end() for worker in workers] == [0, 0, 0]
    assert nursery.alive == []


@pytest.mark.parametrize(
    ("limits", "rows"),
    [(Limits(), 60_000), (Limits(chunk_bytes=4 * KIB, eager_bytes=KIB, window_bytes=16 * KIB, inline_bytes=64, max_outstanding=4), 3000)],
    ids=["usual", "tiny chunks"],
)
async def test_thousands_of_collectives_give_what_torch_gives(limits: Limits, rows: int) -> None:
    rng = random.Random(SEED)
    async with local_cluster(4, limits=limits) as backends:
        runner = Runner(backends)
        for number in range(100):
            started = time.monotonic()
            await asyncio.to_thread(runner.run, [random_step(rng, rows=rows) for _ in range(25)], rng.randrange(10**6))
            print(f"program {number}: 25 collectives, {time.monotonic() - started:.2f} s", flush=True)


@pytest.mark.parametrize("place", NODES)
def test_ten_thousand_collectives_leave_memory_as_it_was(nursery: Nursery, place: str) -> None:
    """Results are checked. On one node data goes through letters, loans, windows, common buffers and streams; on two it does so inside each
    node, and over gRPC between them."""
    nodes, rounds = NODES[place], SOAK_ROUNDS[place]
    growths: list[int] = []
    with scenario(f"10,000 collectives: {place}", SEED) as figures, rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in nodes]
        begin(workers, nodes, work="stream", seed=SEED, rounds=rounds, rows=100_000)
        for worker, node in zip(workers, nodes, strict=True):  # each maps its own window and those of the other ranks of its node
            assert Path(f"/proc/{worker.pid}/maps").read_text().count("shardnet-window") == nodes.count(node)
        for worker in workers:
            held = [worker.hear("holds", skip="streaming", within_s=120.0) for _ in range(10)]
            for each in held:
                numbers = {name: each[name] for name in ("step", "rss", *GROWS_BY_LESS)}
                print(f"rank {worker.rank}: {numbers}", flush=True)
            left = worker.hear("left")
            assert (left["error"], left["leaks"]) == (None, [])
            # memory in use goes up and down by some 30 MiB; a leak grows for good
            for name, more in GROWS_BY_LESS.items():
                assert min(each[name] for each in held[5:]) < max(each[name] for each in held[:5]) + more, name
            growths.append(growth([each["rss"] for each in held], 8 * rounds // 10))
            figures.repeats += 8 * rounds
        assert [worker.end() for worker in workers] == [0] * len(workers)
        figures.rss_delta_bytes = max(growths)
        assert max(growths) <= MIB, growths


def growth(held: list[int], between: int) -> int:
    """Growth in 1,000 collectives, if `between` collectives lie between two looks. Only looks after the warm-up count: pools reach their
    full size within the first 4,500 collectives on one node, and 13,500 on two."""
    return (min(held[7:]) - min(held[3:6])) * 1000 // (4 * between)


async def test_a_large_gradient_does_not_hold_up_a_small_group() -> None:
    """128 MiB over all ranks, and meanwhile one small collective after another between two of them."""
    elements = 128 * MIB // 4
    pattern = torch.arange(elements, dtype=torch.float32).remainder_(251)
    waits_s: list[float] = []

    async def small(group: Backend, large: list[asyncio.Task[torch.Tensor]]) -> None:
        for number in range(10**6):
            # one of the two says when to stop, so that both run the same number of collectives
            going = 0.0 if group.rank == 0 and all(task.done() for task in large) else 1.0
            started = time.monotonic()
            total = await group.all_reduce(torch.tensor([float(number), going]))
            waits_s.append(time.monotonic() - started)
            assert total[0] == 2 * number
            if total[1] < 2:
                return

    async def reduce(backend: Backend, gradient: torch.Tensor) -> torch.Tensor:
        return await backend.all_reduce(gradient, out=gradient)

    async with local_cluster(3) as backends:
        groups = [backends[rank].subgroup((0, 2)) for rank in (0, 2)]
        for number in range(3):
            waits_s.clear()
            gradients = [pattern * (backend.rank + 1) for backend in backends]
            started = time.monotonic()
            large = [asyncio.create_task(reduce(*each)) for each in zip(backends, gradients, strict=True)]
            await asyncio.gather(*(small(group, large) for group in groups), *large)
            took_s = time.monotonic() - started
            print(f"all-reduce {number}: {took_s:.2f} s, {len(waits_s)} small ones beside it, longest {max(waits_s):.3f} s", flush=True)
            wanted = pattern * 6
            assert all(torch.equal(task.result(), wanted) for task in large)
            assert len(waits_s) >= 6, "they waited for the large one to end"


def test_long_training_does_not_grow(nursery: Nursery) -> None:
    steps = 400
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(2)]
        begin(workers, work="train", steps=steps)
        for worker in workers:
            held = [worker.hear("holds", within_s=120.0) for _ in range(10)]
            for each in held:
                numbers = {name: each[name] for name in ("step", "loss", "rss", "descriptors", "threads", "tasks")}
                print(f"rank {worker.rank}: {numbers}", flush=True)
            left = worker.hear("left")
            assert (left["error"], left["leaks"]) == (None, [])
            assert held[-1]["loss"] < held[0]["loss"]
            early, late = held[2], held[-1]  # by then caches are full and pools as large as they get
            assert late["rss"] < early["rss"] + 4 * MIB
            assert late["descriptors"] <= early["descriptors"]
            assert late["threads"] <= early["threads"] + 4  # gRPC's pool has more threads when the machine is busy
            assert late["tasks"] <= early["tasks"] + 8  # those under way at that moment
        assert [worker.end() for worker in workers] == [0, 0]
