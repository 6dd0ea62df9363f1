"""Run a program on the nodes of a network on this machine: one `shardnet run` per node, each in a namespace of its own."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from shardnet.cli.launch.tether import tethered
from shardnet.cli.protection import Protection
from shardnet.testing.namespaces import INTERFACE, Namespace, Network, bridged_nodes

RENDEZVOUS_PORT = 7000  # free: nobody else is in the namespace
GRACE_S = 10.0  # for workers that were told to stop, to close their cluster


class NodeFailed(Exception):
    """A launcher or the rendezvous failed; it has said why on stderr."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with status {status}")
        self.status = status


def run_on_nodes(module: str, arguments: Sequence[str], nodes: int, ranks_per_node: int, rate: str | None, protection: Protection) -> None:
    """Run `python -m module arguments` as `ranks_per_node` workers on each of `nodes` nodes. Their stderr is this process's.

    Neither a process nor a namespace is left when this returns or raises. Raises NodeFailed, NamespacesUnavailable for a
    machine that cannot have namespaces, and KeyboardInterrupt.
    """
    with bridged_nodes(nodes, rate=rate) as network:
        try:
            asyncio.run(_run(network, ("-m", module, "--", *arguments), ranks_per_node, protection))
        except BaseExceptionGroup as group:
            raise _first(group) from None


async def _run(network: Network, program: Sequence[str], ranks_per_node: int, protection: Protection) -> None:
    meeting = f"{network.hub.address}:{RENDEZVOUS_PORT}"
    shape = f"--nproc {ranks_per_node} --nnodes {len(network.nodes)} --rendezvous {meeting}{protection.flags}".split()
    async with asyncio.TaskGroup() as tasks:
        rendezvous = tasks.create_task(
            _shardnet(network.hub, "rendezvous", "--listen", meeting, *protection.flags.split(), token=protection.token, quiet=True)
        )
        async with asyncio.TaskGroup() as launchers:
            for node in network.nodes:
                launchers.create_task(_shardnet(node, "run", *shape, "--node", node.name, *program, token=protection.token))
        rendezvous.cancel()


async def _shardnet(where: Namespace, *arguments: str, token: str, quiet: bool = False) -> None:
    """Run the command to its end; cancelling ends it. Raises NodeFailed. `quiet`: its output is shown only if it fails."""
    command = tethered(where.command(sys.executable, "-m", "shardnet.cli", *arguments))
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL if quiet else None,
        stderr=asyncio.subprocess.PIPE if quiet else None,
        env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "SHARDNET_TOKEN": token},
        start_new_session=True,  # so a Ctrl-C in the terminal reaches it only through this process, and once
    )
    try:
        _, said = await process.communicate()
    finally:
        await _end(process)
    if process.returncode:
        sys.stderr.write((said or b"").decode())
        raise NodeFailed(process.returncode)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Give it time to leave, then kill it; a launcher's workers die with it."""
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
    if process.returncode is None:
        process.kill()
        await process.wait()


def _first(group: BaseException) -> BaseException:
    """The error itself, without the task groups' wrapping; the first error stands for all."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
