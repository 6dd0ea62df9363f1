"""Workers as processes, which tests kill and freeze: the code of a process that a `Nursery` has forked.

Each line that a worker reads is a job to join, as JSON: {"job", "world_size", "work", ...}; WORK below has the kinds of work. The worker
reports when it has joined, and when it has left: with which error, when, what it still holds then, and its work's result. It ends when its
standard input does.
"""

import asyncio
import ctypes
import gc
import json
import pkgutil
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch

import shardnet
from shardnet.backend import ReduceOp
from shardnet.config import Timeouts
from shardnet.errors import PeerLost
from shardnet.loop import LoopThread
from shardnet.testing import same_bits
from tests.contract.programs import GROUPS, expected, inputs_of, random_step, start
from tests.elastic.learner import Learner
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.guards import idle_channel, lasting_leaks
from tests.resources import SHARED_MEMORY, Resources, open_files
from tests.segments import mappings

Command = dict[str, Any]
CLONE_NEWNET = 0x40000000
STREAMING_AFTER = 3  # rounds: from then on a kill hits it between or within collectives, wherever it is


def say(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, "at_s": time.monotonic(), **facts}), flush=True)


class Worker:
    """This process, as a member of one job after the other."""

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = rendezvous
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            while line := sys.stdin.readline():
                loop.call_soon_threadsafe(self._lines.put_nowait, line)
            with suppress(RuntimeError):  # the loop is closed: a signal has ended it before
                loop.call_soon_threadsafe(self._lines.put_nowait, "")

        # a daemon: a thread that is blocked in reading cannot be told to end
        threading.Thread(target=read, name="standard input", daemon=True).start()
        poller = await LoopThread.shared().run_here(idle_channel())
        while line := await self._lines.get():
            command = json.loads(line)
            if command.get("stop"):
                continue  # it has
            if command["work"] == "learn":
                await Learner(self._rendezvous, command, say, lambda: self._lines.qsize() > 0).run()
            else:
                await self.join(command)
        await LoopThread.shared().run_here(poller.close())

    async def join(self, command: Command) -> None:
        before = Resources()
        timeouts = Timeouts(connect_s=10.0, join_s=20.0, suspect_s=command.get("suspect_s", 2.0), collective_s=20.0, drain_s=1.0)
        size = command["world_size"]
        members = {"job": command["job"], "min_world_size": size, "max_world_size": size, "node": command.get("node", "")}
        members |= command.get("settings", {})
        error: Exception | None = None
        result: object = None
        failed_s = 0.0
        try:
            async with shardnet.connect(rendezvous=self._rendezvous, timeouts=timeouts, **members) as cluster:
                say("joined", rank=cluster.rank, address=cluster.topology.me.address)
                try:
                    result = await WORK[command["work"]](self, cluster, command)
                except Exception:
                    failed_s = time.monotonic()
                    raise
        except Exception as caught:  # noqa: BLE001 - told to the test, which knows what to expect
            error = caught
        facts: Command = {"error": None, "result": result}
        if error:
            facts = {"error": type(error).__name__, "lost": getattr(error, "rank", None), "message": str(error)}
        error = None  # its traceback holds the frames, and these hold the backend
        say("left", failed_s=failed_s, leaks=await asyncio.to_thread(lasting_leaks, before), **facts)

    # --- kinds of work

    async def stream(self, cluster: shardnet.Cluster, command: Command) -> int:
        """Run random collectives of the world and of its groups, and check results, until a worker is told to stop; or `rounds` rounds of
        8, reporting after each tenth of them what this process holds. Return the number of rounds."""
        backend, seed = cluster.backend, command.get("seed", 0)
        groups = {members: backend.subgroup(members) for members in groups_of(cluster.world_size) if cluster.rank in members}
        rng = random.Random(seed)
        for number in count():
            program = [random_step(rng, groups_of(cluster.world_size), rows=command.get("rows", 60_000)) for _ in range(8)]
            mine = [step for step in program if cluster.rank in step.members]
            inputs = [inputs_of(step, number) for step in mine]
            ranks = [step.members.index(cluster.rank) for step in mine]
            handles = [start(s, groups[s.members], each[rank]) for s, each, rank in zip(mine, inputs, ranks, strict=True)]
            told = backend.all_reduce(torch.tensor([self._lines.qsize()]), ReduceOp.MAX)
            for outcome in await asyncio.gather(told, *(handle for some in handles for handle in some), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            for step, each, rank, some in zip(mine, inputs, ranks, handles, strict=True):
                wanted = expected(step, each)[rank]
                assert wanted is None or same_bits(await some[-1], wanted), f"{step} in round {number}"
            cluster.report(step=number + 1, total_steps=0, loss=1.0)
            if number == STREAMING_AFTER:
                say("streaming")
            rounds = command.get("rounds", 0)
            if rounds and (number + 1) % (rounds // 10) == 0:
                del handles, outcome, wanted, inputs, each, some
                say("holds", step=number + 1, **holdings())
            if (await told).item() or number + 1 == rounds:
                return number + 1
        raise AssertionError("unreachable: count() does not end")

    async def call(self, cluster: shardnet.Cluster, command: Command) -> object:
        """Call a function with the backend and arguments in a thread of its own: "module:name". Return its result."""
        return await asyncio.to_thread(pkgutil.resolve_name(command["function"]), cluster.backend, *command["arguments"])

    async def hold(self, cluster: shardnet.Cluster, command: Command) -> None:
        """Rank 0 holds the GIL for some seconds, as C code that loads a large file may do."""
        await cluster.backend.barrier()
        if cluster.rank == 0:
            ctypes.PyDLL(None).sleep(command["seconds"])
        await cluster.backend.barrier()

    async def endure(self, cluster: shardnet.Cluster, command: Command) -> None:
        """Train; when another worker is lost, stay until one is told to stop, like a program that a person should inspect."""
        try:
            await self.train(cluster, command)
        except PeerLost:
            say("bereft")
            await self._lines.get()

    async def train(self, cluster: shardnet.Cluster, command: Command) -> None:
        """Train a small GPT; report after each tenth of the steps what this process holds."""
        steps, samples = command["steps"], 2
        model = await cluster.shard(make_gpt(width=96, layers=4), units=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = token_batches(16, samples * cluster.world_size)
        for step in range(1, steps + 1):
            begin_s = time.monotonic()
            batch = batches[step % len(batches)][cluster.rank * samples :][:samples]
            loss = await model.run(loss_of, model.fsdp, batch)
            await model.backward(loss)
            await model.clip_grad_norm(1.0)
            await model.step(optimizer)
            optimizer.zero_grad()
            mean = await cluster.mean(loss.item())
            tokens = batch.numel() * cluster.world_size
            cluster.report(step=step, total_steps=steps, loss=mean, tokens_per_s=tokens / (time.monotonic() - begin_s))
            if step % (steps // 10) == 0:
                say("holds", step=step, loss=mean, **holdings())


def groups_of(world_size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of random programs that fit into a world of this size."""
    found = {tuple(rank for rank in members if rank < world_size) for members in GROUPS}
    return tuple(sorted(found - {()}))


def holdings() -> dict[str, int]:
    gc.collect()  # otherwise garbage that waits for the collector would count, too, and that goes up and down
    ctypes.CDLL(None).malloc_trim(0)  # free memory that malloc keeps goes up and down as well
    me = psutil.Process()
    running = LoopThread.shared().loop
    return {
        "rss": me.memory_info().rss,
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "tasks": len(asyncio.all_tasks(running)) + len(asyncio.all_tasks()),
        "memfd_mappings": sum("/memfd:" in line for line in mappings()),
        "memfd_descriptors": sum(name.startswith("/memfd:") for name in open_files()),
        "shm_names": sum(1 for _ in SHARED_MEMORY.iterdir()),
    }


WORK: dict[str, Callable[[Worker, shardnet.Cluster, Command], Awaitable[object]]] = {
    "call": Worker.call,
    "stream": Worker.stream,
    "hold": Worker.hold,
    "endure": Worker.endure,
    "train": Worker.train,
}


def enter(namespace: str) -> None:
    """Move to a network namespace. Call it before there are other threads, which would stay behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def work(rendezvous: str, namespace: str) -> int:
    """Run in a new process; return its exit status."""
    if namespace:
        enter(namespace)
    torch.set_num_threads(1)
    shardnet.run(Worker(rendezvous).run)
    return 0
