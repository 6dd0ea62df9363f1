"""What processes do for test_links.py: train over slow links, relay between workers, and be strangers that vanish."""

import asyncio
import socket
import sys
import time
from typing import Any

import grpc
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from torch import nn

from shardnet.backend import Backend
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.fsdp import FSDP
from shardnet.loop import LoopThread
from shardnet.testing.conditions import Conditions
from shardnet.testing.relay import Relay
from shardnet.transport.http2 import OPENING
from tests.training.worker import enter

SAMPLE_EVERY_S = 0.005
WATCHING = "that they watch"
SAID = {"nothing": b"", "half a greeting": OPENING[: len(OPENING) // 2], "a greeting of ours": OPENING}
HALF_OPEN = 40  # connections of a stranger


class InFlight:
    """The most that was on its way to one peer at any moment; its methods are for the loop thread.

    Those are the bytes that the kernel has taken and the peer's kernel has not acknowledged. Data that waits behind them is not copied: a
    chunk or two of each collective under way stays in the caller's memory.
    """

    def __init__(self, backend: Backend) -> None:
        assert isinstance(backend, MeshBackend)
        mesh: Any = backend._board.mesh
        self._outboxes = mesh._outboxes.values()
        self.most_bytes = 0
        self.most_waiting_bytes = 0

    async def watch(self) -> None:
        while True:
            for call in [outbox._call for outbox in self._outboxes if outbox._call is not None]:
                sent = call._unacknowledged_bytes()
                self.most_bytes = max(self.most_bytes, sent)
                self.most_waiting_bytes = max(self.most_waiting_bytes, call.outgoing_bytes - sent)
            await asyncio.sleep(SAMPLE_EVERY_S)


def train(backend: Backend, width: int, layers: int, steps: int) -> dict[str, Any]:
    """For `Worker.call`: each step's seconds and bytes sent, the most in flight on a link, and the sum of the trained parameters."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))), backend, units=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(backend.rank))
    seconds, sent = [], []
    in_flight = InFlight(backend)
    watching = LoopThread.shared().run(in_flight.watch())
    for _ in range(steps):
        backend.barrier().wait()
        start, before = time.monotonic(), backend.telemetry.bytes_sent
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.barrier().wait()
        seconds.append(time.monotonic() - start)
        sent.append(backend.telemetry.bytes_sent - before)
    watching.cancel()
    total = sum(float(value.double().sum()) for value in model.full_state_dict().values())
    return {"seconds": seconds, "sent": sent, "in_flight": in_flight.most_bytes, "waiting": in_flight.most_waiting_bytes, "total": total}


def relay(namespace: str, listen: str, target: str, latency_s: str) -> int:
    """In a process of its own: relay to a worker until standard input ends, and delay everything that passes by `latency_s`."""
    enter(namespace)

    async def stand() -> None:
        async with Relay(target, listen=listen) as standing:
            standing.conditions = Conditions(latency_s=float(latency_s))
            print(standing.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(stand())
    return 0


def stranger(namespace: str, address: str, words: str) -> int:
    """In a process of its own: open connections, say `words` on each, and hold them until this process is killed."""
    enter(namespace)
    host, port = address.rsplit(":", 1)
    held: list[object] = []
    for _ in range(HALF_OPEN):
        if words == WATCHING:
            channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            watching = HealthStub(channel).Watch(HealthCheckRequest())
            next(watching)
            held += channel, watching
        else:
            caller = socket.create_connection((host, int(port)), timeout=10.0)
            caller.sendall(SAID[words])
            held.append(caller)
    print(HALF_OPEN, flush=True)
    sys.stdin.read()
    return 0
