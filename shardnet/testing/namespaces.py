"""Nodes that are real for the kernel, on one machine: network namespaces on one bridge. For Linux, as root, with iproute2.

    with bridged_nodes(2, rate="1gbit") as network:
        subprocess.run(network.nodes[0].command("ping", "-c1", network.nodes[1].address))

The bridge lies in a namespace of its own, the hub, so the machine's own network is neither used nor changed, no address can
clash with others, and only the namespaces must be removed afterwards.

[Note: the keeper] A separate process removes the namespaces as soon as it reads the end of its standard input: when the block is
left, and when this process is gone, for example killed with SIGKILL. It is in a session of its own, out of Ctrl-C's reach.
Processes that still run inside keep their nameless network until they end.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardnet.errors import UsageError

INTERFACE = "eth0"  # a node's way to the others
BRIDGE = "bridge"
MAX_NODES = 253  # addresses that are left in a /24
# tbf: how much may go out at once, which must hold a segment of 64 KiB as the stack hands it over; how much may queue, as in a switch
_BURST, _QUEUE = "128kb", "20ms"
_KEEP = 'read -r _; for name; do "$0" netns delete "$name"; done'


class NamespacesUnavailable(Exception):
    """This machine or this user cannot make them; the message says why."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own, with one address."""

    name: str
    address: str

    def command(self, *command: str) -> tuple[str, ...]:
        """The command line that runs `command` inside. It becomes that command: signals and the exit status are its own."""
        return (_tool("ip"), "netns", "exec", self.name, *command)


@dataclass(frozen=True, slots=True)
class Network:
    """`nodes` reach each other and the `hub` between them, and nothing else."""

    hub: Namespace
    nodes: tuple[Namespace, ...]


@contextmanager
def bridged_nodes(count: int, *, rate: str | None = None) -> Iterator[Network]:
    """Namespaces joined by a bridge, removed when the block is left; before that, end the processes that you start inside.

    rate  of each node's link, in each direction, as tc writes it: "1gbit". None: as fast as the processor allows

    Raises NamespacesUnavailable, and UsageError for an impossible number of nodes.
    """
    if not 1 <= count <= MAX_NODES:
        raise UsageError(f"a network has 1 to {MAX_NODES} nodes, got {count}")
    prefix = f"shardnet-{secrets.token_hex(4)}"
    hub = Namespace(f"{prefix}-hub", "10.99.0.254")
    network = Network(hub, tuple(Namespace(f"{prefix}-{number}", f"10.99.0.{number + 1}") for number in range(count)))
    with _keeper([namespace.name for namespace in (hub, *network.nodes)]):
        _make_hub(hub)
        for number, node in enumerate(network.nodes):
            _make_node(node, hub, port=f"port{number}", rate=rate)
        yield network


@contextmanager
def _keeper(names: list[str]) -> Iterator[None]:
    """[Note: the keeper]"""
    command = ["sh", "-c", _KEEP, _tool("ip"), *names]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def _make_hub(hub: Namespace) -> None:
    _make_namespace(hub)
    _ip(hub, "link", "add", BRIDGE, "type", "bridge")
    _bring_up(hub, BRIDGE)


def _make_node(node: Namespace, hub: Namespace, port: str, rate: str | None) -> None:
    _make_namespace(node)
    _ip(hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", node.name)
    _ip(hub, "link", "set", port, "master", BRIDGE, "up")
    _bring_up(node, INTERFACE)
    if rate is not None:
        for namespace, end in ((node, INTERFACE), (hub, port)):  # for data that the node sends, and that it receives
            _run("tc", "-n", namespace.name, *f"qdisc add dev {end} root tbf rate {rate} burst {_BURST} latency {_QUEUE}".split())


def _make_namespace(namespace: Namespace) -> None:
    _run("ip", "netns", "add", namespace.name)
    _ip(namespace, "link", "set", "lo", "up")


def _bring_up(namespace: Namespace, device: str) -> None:
    _ip(namespace, "address", "add", f"{namespace.address}/24", "dev", device)
    _ip(namespace, "link", "set", device, "up")


def _ip(namespace: Namespace, *arguments: str) -> None:
    _run("ip", "-n", namespace.name, *arguments)


def _run(tool: str, *arguments: str) -> None:
    done = subprocess.run([_tool(tool), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise NamespacesUnavailable(f"network namespaces cannot be made here: {tool} {' '.join(arguments)}: {said}")


def _tool(name: str) -> str:
    """The tool's whole path; it may lie in a folder that only root searches."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise NamespacesUnavailable(f"network namespaces cannot be made here: there is no {name!r}, which is part of Linux's iproute2")
    return path
