"""`TorchSource`: makes a rank's torch process groups, and how the ranks of a node agree on one."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from shardnet.config import NodeEngine
from shardnet.errors import StateError, UsageError

if TYPE_CHECKING:
    from shardnet.backend.base import Backend

LOOPBACK = "127.0.0.1"
_CONNECT = timedelta(seconds=30)
_LOOK_EVERY_S = 0.0005
_NEVER = timedelta(days=1)  # shardnet's own timeouts decide how long a collective may take


@dataclass(frozen=True)
class TorchSource:
    """Makes the process groups of one rank, all of one engine; lives as long as the epoch.

    `connect` gives a torch store that all ranks of a process group see. It makes a new one for every group, because a rank that waits on a
    store would hold up others that use it. `hostname` is where gloo listens; `serving` is an object to keep alive as long as this one.
    Raises UsageError for an engine that this process cannot use.
    """

    engine: NodeEngine
    connect: Callable[[], c10d.Store]
    hostname: str = LOOPBACK
    serving: object = None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        if self.engine is NodeEngine.SHARDNET:
            raise UsageError("the engine of a torch process group must be 'nccl' or 'gloo', got 'shardnet'")

    @property
    def devices(self) -> frozenset[str]:
        """The kinds of device whose tensors it carries."""
        return frozenset({"cuda"} if self.engine is NodeEngine.NCCL else {"cpu"})

    def make(self, name: str, rank: int, size: int, is_wanted: Callable[[], bool]) -> Any:
        """A process group of that name. Blocks until all of its ranks call this.

        Raises StateError if one of them no longer wants the group before that.
        """
        store = c10d.PrefixStore(name, self.connect())
        _meet(store, size, is_wanted)
        if self.engine is NodeEngine.GLOO:
            gloo: Any = c10d.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self.hostname)]
            options._threads = 1
            options._timeout = _CONNECT
            return gloo(store, rank, size, options)
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _NEVER
        # Otherwise torch would end the process on a failure, not only the collective.
        with _unless_set(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
            return nccl(store, rank, size, options)

    @classmethod
    async def on_node(cls, backend: "Backend", engine: NodeEngine) -> Self:
        """A source for the ranks of a node, all of which call this with the backend of their world.

        The first rank of the node serves a store on loopback; the others learn its port over the mesh.
        """
        (node,) = (node for node in backend.node_ranks if backend.rank in node)
        serving: c10d.TCPStore | None = None
        port = torch.zeros(1, dtype=torch.int64, device="cpu")
        if backend.rank == node[0]:
            # A socket of our own, because torch would listen on all addresses of the machine.
            listening = socket.create_server((LOOPBACK, 0))
            port[0] = listening.getsockname()[1]
            serving = _tcp_store(int(port), listening.detach())
        number = int(await backend.subgroup(node).broadcast(port, 0, label="port of the node's store"))
        return cls(engine, lambda: _tcp_store(number), serving=serving)


def check_engine(engine: NodeEngine) -> None:
    """Raise UsageError if this process cannot use the engine."""
    if engine is NodeEngine.NCCL and not (torch.cuda.is_available() and distributed.is_nccl_available()):
        lacks = "torch sees no GPU here" if distributed.is_nccl_available() else "this build of torch has no NCCL"
        raise UsageError(
            f"node_engine 'nccl' (SHARDNET_NODE_ENGINE) is not available: {lacks}; install torch for CUDA and check `nvidia-smi`, "
            "or leave the setting out on all ranks"
        )
    if engine is NodeEngine.GLOO and not distributed.is_gloo_available():
        raise UsageError(
            "node_engine 'gloo' (SHARDNET_NODE_ENGINE) is not available: this build of torch has no gloo; leave the setting out"
        )


def choose_gpu(local_rank: int) -> None:
    """Make GPU number `local_rank` the current one, unless the program has already begun to use a GPU.

    Raises UsageError if there are too few GPUs: NCCL does not accept two ranks on one GPU.
    """
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        return
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"node_engine 'nccl' needs one GPU per worker, but worker {local_rank} of this machine (counted from 0) sees only "
            f"{torch.cuda.device_count()} in all; "
            "start fewer workers here, or set another device with torch.cuda.set_device before connect()"
        )
    torch.cuda.set_device(local_rank)


def _tcp_store(port: int, listening: int | None = None) -> c10d.TCPStore:
    serves = listening is not None
    # without libuv, with which a process would keep descriptors open for ever
    return c10d.TCPStore(LOOPBACK, port, None, serves, _CONNECT, wait_for_workers=False, master_listen_fd=listening, use_libuv=False)


@contextmanager
def _unless_set(**variables: str) -> Iterator[None]:
    """Set environment variables inside the block, except those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _meet(store: c10d.Store, size: int, is_wanted: Callable[[], bool]) -> None:
    """Wait until all ranks of a process group are about to make it: from then on torch waits for them, and cannot be stopped.

    Either all ranks go on or none does: the last one to arrive writes "go", the first one to give up writes "gone", and whichever is
    written first stays.
    """
    if store.add("arrived", 1) == size:
        store.compare_set("verdict", "", "go")
    while not store.check(["verdict"]):
        if not is_wanted():
            store.compare_set("verdict", "", "gone")
        time.sleep(_LOOK_EVERY_S)
    if store.get("verdict") != b"go":
        raise StateError("a rank of the torch process group gave up before all ranks had arrived")
