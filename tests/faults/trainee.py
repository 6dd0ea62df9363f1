"""A training program that is interrupted, for test_interrupts.py: `python -m tests.faults.trainee ROLE PHASE RUNNER`

One process, "ahead", goes on until it waits in a certain phase for "behind", which stops before that phase for ever. A "victim" dies, so
that the other two reform. Each process prints where it is. The environment says where the rendezvous is, as for any worker.
"""

import asyncio
import os
import signal
import socket
import sys
import time
import warnings
from typing import Any

import torch

import shardnet
from shardnet import Cluster, elastic
from shardnet.config import Timeouts
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import join
from shardnet.rendezvous.request import JoinRequest
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches

# in the order in which a training comes to them
PHASES = ("joining", "forming the mesh", "sharding", "forward", "backward", "step", "commit", "reform", "the end", "closing")
STEP = 2  # in which the phases of a step happen
AHEAD, BEHIND, VICTIM = "ahead", "behind", "victim"
TIMEOUTS = Timeouts(connect_s=60.0, join_s=60.0, suspect_s=5.0)


class Trainee:
    """One of these processes, on its way to the phase."""

    def __init__(self, role: str, phase: str) -> None:
        self._role = role
        self._phase = phase
        self._size = 3 if phase == "reform" else 2

    async def run(self) -> None:
        if self._phase == "cleaning up":
            await self._clean_up()
            return
        await self._at("joining")
        if self._role == BEHIND and self._phase == "forming the mesh":
            await self._become_a_member_and_no_more()
        if self._phase == "closing":
            async with shardnet.connect(**self._world()) as cluster:
                pending = cluster.backend.barrier().quietly()
                await self._at("closing")
            await pending
        else:
            await elastic.run(self._train, elastic=True, **self._world())

    def _world(self) -> dict[str, Any]:
        return {"min_world_size": 2, "max_world_size": self._size, "timeouts": TIMEOUTS}

    async def _at(self, phase: str) -> None:
        """If this is the phase in question, say so; then "behind" stays here for ever and a "victim" dies."""
        if phase != self._phase:
            return
        say(self._role)
        if self._role == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._role == BEHIND:
            await asyncio.Event().wait()

    async def _become_a_member_and_no_more(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts connections, but says nothing on them
            address = "{}:{}".format(*server.getsockname())
            request = JoinRequest(os.environ.get("SHARDNET_JOB", "default"), "behind", address, "here", 2, 2, 1, elastic=True)
            membership = join(os.environ["SHARDNET_RENDEZVOUS"], request, timeouts=TIMEOUTS)
            await LoopThread.shared().run_here(membership.__aenter__())
            say(AHEAD)  # said on its behalf: it is forming the mesh by now, and cannot say so itself
            await self._at(self._phase)

    async def _train(self, cluster: Cluster, state: elastic.State) -> None:
        if cluster.world_size < 3 and self._phase == "reform":
            raise AssertionError("it was formed anew")
        await self._at("sharding")
        model = await cluster.shard(make_gpt(width=96, layers=3), units=(Block,))
        optimizer = torch.optim.AdamW(model.parameters())
        await state.resume(model, optimizer)
        batches = token_batches(16, 2)
        try:
            while state.step <= STEP:
                phase = self._at if state.step == STEP else never
                await phase("forward")
                loss = await model.run(loss_of, model.fsdp, batches[state.step])
                await phase("backward")
                await model.backward(loss)
                await phase("step")
                await model.clip_grad_norm(1.0)
                await model.step(optimizer)
                optimizer.zero_grad()
                await phase("commit")
                await state.commit(state.step + 1)
                if self._role == VICTIM and state.step == STEP:
                    await self._at("reform")
        except shardnet.PeerLost:
            await self._at("reform")
            raise
        await self._at("the end")

    async def _clean_up(self) -> None:
        """A user's own clean-up, which takes long; the second Ctrl-C cuts it short."""
        async with shardnet.connect():
            try:
                say(self._role)
                await asyncio.Event().wait()
            finally:
                say("cleans up")
                await asyncio.sleep(60.0)


async def never(_: str) -> None:
    pass


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")  # in one write, because the processes share a pipe
    sys.stdout.flush()


def begin(role: str, phase: str, runner: str, rendezvous: str) -> int:
    """Begin in a forked process."""
    os.environ |= {"SHARDNET_RENDEZVOUS": rendezvous}
    return main(role, phase, runner)


def main(role: str, phase: str, runner: str) -> int:
    warnings.simplefilter("error")  # imported packages have issued their warnings by now
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests with `&` makes them ignore SIGINT
    trainee = Trainee(role, phase)
    try:
        if runner == "asyncio.run":
            asyncio.run(trainee.run())
        else:
            shardnet.run(trainee.run)
    finally:
        say(f"{role} left at {time.monotonic()}")  # the rest is Python's: taking torch apart takes longer
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a worker of `shardnet run`
        sys.argv.insert(1, (AHEAD, BEHIND, VICTIM)[int(os.environ["SHARDNET_LOCAL_RANK"])])
    sys.exit(main(*sys.argv[1:]))
