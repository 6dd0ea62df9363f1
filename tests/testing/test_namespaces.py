"""Namespaces on a bridge: what they reach, how fast, and that nothing of them is left."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardnet.errors import UsageError
from shardnet.testing.namespaces import Namespace, NamespacesUnavailable, Network, bridged_nodes
from tests.networks import nodes_or_skip

PATIENCE_S = 20.0
MIB = 1 << 20

SERVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    caller, _ = server.accept()
    with caller:
        count, start_s = 0, time.monotonic()
        while data := caller.recv(1 << 20):
            count += len(data)
    print(count, time.monotonic() - start_s)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as caller:
    caller.sendall(bytes(int(sys.argv[2])))
"""
CALL_OUT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), timeout=5)
except OSError as error:
    print(type(error).__name__, error.errno)
"""
KILLED = """
import os, signal
from shardnet.testing.namespaces import bridged_nodes
with bridged_nodes(1) as network:
    print(network.hub.name, network.nodes[0].name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_node_reaches_the_others() -> None:
    with nodes_or_skip(2) as network:
        count, _ = sent(network, 3 * MIB)
    assert count == 3 * MIB


def test_a_link_is_as_slow_as_it_should_be() -> None:
    with nodes_or_skip(2, rate="100mbit") as network:
        count, seconds = sent(network, 4 * MIB)
    assert count == 4 * MIB
    assert seconds > 0.9 * 8 * 4 * MIB / 100e6  # a burst of a few segments goes out at once; headers take longer than that


@pytest.mark.parametrize("address", ["127.0.0.1", "198.51.100.1"])
def test_a_node_reaches_nothing_else(address: str) -> None:
    with nodes_or_skip(1) as network:
        said = output(network.nodes[0], CALL_OUT, address)
    assert said in ("ConnectionRefusedError 111\n", "OSError 101\n")  # nothing listens on its loopback; there is no route outside


def test_nothing_is_left_after_an_error() -> None:
    seen: set[str] = set()

    def fail() -> None:
        with nodes_or_skip(2) as network:
            seen.update(name for name in made() if name in {network.hub.name, *(node.name for node in network.nodes)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(seen) == 3
    assert not seen & made()


def test_nothing_is_left_of_one_that_could_not_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "unfinished")
    with nodes_or_skip(1):
        pass
    with pytest.raises(NamespacesUnavailable, match=r"tc .*rate fast.*: .*rate"), bridged_nodes(1, rate="fast"):
        pass
    assert not [name for name in made() if "unfinished" in name]


def test_nothing_is_left_of_a_process_that_was_killed() -> None:
    with nodes_or_skip(1):
        pass
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert killed.returncode == -signal.SIGKILL
    left = set(killed.stdout.split())
    assert len(left) == 2
    deadline_s = time.monotonic() + PATIENCE_S
    while left & made():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # the keeper has lost its parent, so no process can be waited for


def test_a_machine_without_the_tools_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(NamespacesUnavailable, match="there is no 'ip', which is part of Linux's iproute2"), bridged_nodes(1):
        pass


@pytest.mark.parametrize("count", [0, 254])
def test_a_network_that_has_no_addresses_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"got {count}"), bridged_nodes(count):
        pass


def sent(network: Network, size: int) -> tuple[int, float]:
    """Send `size` bytes from the second node to the first; return how many arrive, and how many seconds they take."""
    server, client = network.nodes
    command = server.command(sys.executable, "-c", SERVE, server.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "listening\n"
        output(client, SEND, server.address, str(size))
        count, seconds = serving.stdout.read().split()
    return int(count), float(seconds)


def output(where: Namespace, program: str, *arguments: str) -> str:
    command = where.command(sys.executable, "-c", program, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def made() -> set[str]:
    """The names of all namespaces of this machine."""
    return {path.name for path in Path("/run/netns").glob("*")}
