"""What a worker process does for the tests of elastic training: it trains, reports each step, and dies where it is told to."""

import hashlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardnet
from shardnet import Cluster, ReduceOp
from shardnet.config import Timeouts
from shardnet.elastic import State, run
from tests.fsdp.models import Block, make_gpt, token_batches

Say = Callable[..., None]
SAMPLES = 2  # per rank and step


class Learner:
    """One process's part in an elastic training, in all of its epochs.

    The command: `job`, `least`, `most`, `node`. A process that should die also gets `dies` ("forward", "backward", "commit" or
    "committed") and `at`, the number of steps that it has seen by then.
    """

    def __init__(self, rendezvous: str, command: Mapping[str, Any], say: Say, told: Callable[[], bool]) -> None:
        """`told`: whether somebody has told this process to stop."""
        self._rendezvous = rendezvous
        self._command = command
        self._say = say
        self._told = told
        self._place = ""
        self._steps = 0

    async def run(self) -> None:
        command = self._command
        timeouts = Timeouts(connect_s=10.0, join_s=30.0, suspect_s=command.get("suspect_s", 2.0), collective_s=20.0, drain_s=1.0)
        error: Exception | None = None
        try:
            await run(
                self._train,
                rendezvous=self._rendezvous,
                timeouts=timeouts,
                elastic=True,
                job=command["job"],
                min_world_size=command["least"],
                max_world_size=command["most"],
                node=command.get("node", ""),
                insecure=command.get("insecure", False),
            )
        except Exception as caught:  # noqa: BLE001 - told to the test, which knows what to expect
            error = caught
        self._say("left", error=type(error).__name__ if error else None, message=str(error or ""))

    async def _train(self, cluster: Cluster, state: State) -> None:
        try:
            await self._learn(cluster, state)
        except shardnet.PeerLost as error:
            self._say("failed", lost=error.rank, message=str(error))
            raise

    async def _learn(self, cluster: Cluster, state: State) -> None:
        model = await cluster.shard(make_gpt(width=96, layers=3), units=(Block,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._watch(model.fsdp.module)
        await state.resume(model, optimizer, digest="")
        found = await digest(model, optimizer, cluster)
        facts = {"epoch": cluster.topology.epoch, "rank": cluster.rank, "world_size": cluster.world_size, "step": state.step}
        self._say("resumed", **facts, digest=found, committed=state["digest"], copies=state.nbytes)
        batches = token_batches(16, SAMPLES * cluster.world_size)
        while True:
            batch = batches[state.step % len(batches)][cluster.rank * SAMPLES :][:SAMPLES]
            enough = cluster.backend.all_reduce(torch.tensor([int(self._told())]), ReduceOp.MAX)
            self._place = "forward"
            logits = await model(batch[:, :-1])
            self._place = "backward"
            await model.backward(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
            await model.step(optimizer)
            optimizer.zero_grad()
            found = await digest(model, optimizer, cluster)
            self._at("commit")
            await state.commit(state.step + 1, digest=found)
            self._steps += 1
            self._say("step", step=state.step, digest=found, commit_s=state.commit_s)
            self._at("committed")
            if (await enough).item():
                return

    def _watch(self, module: nn.Module) -> None:
        """Die within a pass, after the second block's forward or backward, while units are gathered or reduced."""
        blocks = [each for each in module.modules() if isinstance(each, Block)]
        blocks[1].register_forward_hook(lambda *_: self._at("forward"))
        blocks[1].register_full_backward_hook(lambda *_: self._at("backward"))

    def _at(self, place: str) -> None:
        if place in ("forward", "backward") and place != self._place:
            return
        if self._command.get("dies") == place and self._steps >= self._command["at"]:
            self._say("dies", place=place)
            os.kill(os.getpid(), signal.SIGKILL)


async def digest(model: shardnet.AsyncFSDP, optimizer: torch.optim.Optimizer, cluster: Cluster) -> str:
    """A digest of all parameters and Adam's state, equal on all ranks and for all world sizes; a collective."""
    found = hashlib.blake2b(digest_size=8)
    for value in (await model.full_state_dict()).values():
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    for key in ("exp_avg", "exp_avg_sq"):
        for group in model.fsdp.groups:
            parts = [optimizer.state.get(each, {}).get(key, torch.zeros_like(each)).detach().reshape(-1) for each in group.originals]
            flat = await cluster.backend.all_gather(torch.cat(parts), sizes=group.layout.sizes)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
