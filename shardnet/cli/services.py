"""What the launcher needs of the cluster: a rendezvous of its own, and a worker's progress."""

from shardnet.config import Timeouts
from shardnet.credentials import Security
from shardnet.pb import stats_pb2
from shardnet.rendezvous.server import RendezvousServer
from shardnet.telemetry import Progress
from shardnet.transport.observe import snapshot

PROGRESS_TIMEOUT_S = 2.0  # a busy worker answers late; a bar that stands still for longer says so by itself
CLOSE_S = 0.2  # the workers are gone when a local rendezvous closes: nobody's goodbye is waited for


def local_rendezvous(security: Security) -> RendezvousServer:
    """A rendezvous for the workers of this machine alone, on a port that the system chooses."""
    return RendezvousServer("127.0.0.1:0", timeouts=Timeouts(drain_s=CLOSE_S), security=security)


async def worker_progress(address: str, *, security: Security) -> Progress:
    """What the worker's program reported last; raises EndpointUnavailable, HandshakeError or ProtocolError."""
    reply = await snapshot(address, timeout_s=PROGRESS_TIMEOUT_S, security=security)
    return read_progress(reply.progress)


def read_progress(message: stats_pb2.Progress) -> Progress:
    return Progress(
        step=message.step,
        total_steps=message.total_steps,
        loss=message.loss,
        tokens_per_s=message.tokens_per_s,
        exposed_share=message.exposed_share,
        note=message.note,
    )
