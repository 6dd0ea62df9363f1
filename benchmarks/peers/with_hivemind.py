"""The course with hivemind's GradientAverager. With the argument `meet` this is the first node of the hash table, which trains nothing."""

import sys

import hivemind
from hivemind.optim.grad_averager import GradientAverager

from benchmarks.peers.course import LEAST, MEETING, RANKS, SEQUENCES, loss_and_gradients, new_batch, new_model, new_optimizer, say, serve

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


def meet() -> None:
    dht = hivemind.DHT(host_maddrs=LOOPBACK, start=True)
    say(meeting=str(dht.get_visible_maddrs()[0]))
    sys.stdin.read()
    dht.shutdown()


def train() -> None:
    dht = hivemind.DHT(initial_peers=[MEETING], host_maddrs=LOOPBACK, start=True)
    model, batch = new_model(), new_batch()
    optimizer = new_optimizer(model.parameters())
    averager = GradientAverager(
        model.parameters(),
        dht=dht,
        prefix="course",
        reuse_grad_buffers=True,
        target_group_size=RANKS,  # a group that is full waits for nobody else
        min_group_size=LEAST,
        allreduce_timeout=30.0,
        start=True,
    )

    def step() -> tuple[float, int] | None:
        loss = loss_and_gradients(model, batch)
        averager.accumulate_grads_(SEQUENCES)
        group = averager.step(timeout=60.0, reset_accumulators=False)
        if group is not None:
            with averager.use_averaged_gradients():
                optimizer.step()
        averager.reset_accumulated_grads_()
        return None if group is None else (loss, len(group))

    serve(step)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    meet() if sys.argv[1:] == ["meet"] else train()
