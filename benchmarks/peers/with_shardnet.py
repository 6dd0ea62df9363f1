"""The course with shardnet: `STRATEGY [elastic] [grpc]`. With `grpc` each rank is a node, so that nothing goes through memory."""

import asyncio
import sys
import time

import shardnet
from benchmarks.peers.course import LEAST, MEETING, RANK, RANKS, loss_of, new_batch, new_model, new_optimizer, say, say_step
from gpt import Block
from shardnet import elastic


class Runner:
    """What stays the same through all epochs."""

    def __init__(self) -> None:
        self.goal = 0  # steps to do in all
        self.ready = False

    async def train(self, cluster: shardnet.Cluster, state: elastic.State) -> None:
        batch = new_batch()
        model = await cluster.shard(new_model(), units=(Block,), strategy=shardnet.ShardingStrategy[sys.argv[1]])
        optimizer = new_optimizer(model.parameters())
        await state.resume(model, optimizer)
        if not self.ready:
            say(ready=True)
            self.ready = True
        while await self._goes_on(state.step):
            began_s = time.monotonic()
            try:
                loss = loss_of(await model(batch[:, :-1]), batch)
                await model.backward(loss)
                await model.step(optimizer)
                optimizer.zero_grad()
                await state.commit(state.step + 1)
            except shardnet.PeerLost:
                say(vain=True)
                raise
            say_step(state.step, loss.item(), cluster.world_size, began_s)

    async def _goes_on(self, done: int) -> bool:
        while done >= self.goal:
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                return False
            self.goal += int(line)
        return True


async def main() -> None:
    await elastic.run(
        Runner().train,
        rendezvous=MEETING,
        min_world_size=LEAST,
        max_world_size=RANKS,
        elastic="elastic" in sys.argv,
        local_rank=RANK,
        wished_rank=RANK,
        node=f"node-{RANK}" if "grpc" in sys.argv else "",
    )


shardnet.run(main)
