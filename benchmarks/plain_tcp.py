"""What plain TCP takes between two nodes, without shardnet: `python -m benchmarks.plain_tcp`, as root.

Each process and its counterpart on the other node send each other what an all_gather makes them send, on one connection in each
direction, as shardnet does, or on several. Ranks wait for each other only between rounds, and only within their node. The time is that of
one process, and so are the CPU seconds, per GiB that it sends, and receives.
"""

import argparse
import multiprocessing
import multiprocessing.synchronize
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.plan import Topology
from shardnet.config import MIB
from shardnet.testing.namespaces import bridged_nodes

ROUNDS = {1 * MIB: 150, 16 * MIB: 30, 64 * MIB: 10}  # by bytes of the whole tensor
WARM_UP_ROUNDS = 3
PORT = 9000
PATIENCE_S = 20.0
MODULE = "benchmarks.plain_tcp"


def main() -> None:
    options = parse_options()
    if options.node is not None:
        place, address = options.node
        run_node(place, address, options)
        return
    with bridged_nodes(2, rate=options.rate) as network:
        address = network.nodes[0].address
        same = ("--ranks", str(options.ranks), "--streams", str(options.streams))
        commands = (
            node.command(sys.executable, "-m", MODULE, "--node", str(place), address, *same) for place, node in enumerate(network.nodes)
        )
        nodes = [subprocess.Popen(command) for command in commands]
        sys.exit(max(node.wait() for node in nodes))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Measure plain TCP between two network namespaces.")
    parser.add_argument("--rate", type=lambda text: None if text == "none" else text, default=Topology.NETNS_1GBIT.rate, help="or none")
    parser.add_argument("--ranks", type=int, default=2, help="of a node (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=1, help="connections of a rank, each way (default: %(default)s)")
    parser.add_argument("--node", nargs=2, help=argparse.SUPPRESS)  # for its own subprocesses: which node, and where the first node listens
    return parser.parse_args()


def run_node(place: str, address: str, options: argparse.Namespace) -> None:
    """Run one of the two nodes to its end; the first one listens at the address."""
    barrier = multiprocessing.Barrier(options.ranks)
    ranks = [multiprocessing.Process(target=run_rank, args=(place, address, rank, options, barrier)) for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_rank(place: str, address: str, rank: int, options: argparse.Namespace, barrier: "multiprocessing.synchronize.Barrier") -> None:
    first = PORT + 2 * options.streams * rank
    ports = range(first, first + 2 * options.streams)
    connections = [accept(address, port) if place == "0" else dial(address, port) for port in ports]
    halves = connections[: options.streams], connections[options.streams :]
    outgoing, incoming = halves if place == "0" else reversed(halves)
    for size, rounds in ROUNDS.items():
        part = size // (2 * options.ranks * options.streams)  # of this rank's block, which goes to the other node
        data, rooms = bytes(part), [memoryview(bytearray(part)) for _ in incoming]
        times_ms = [exchange(outgoing, incoming, data, rooms, barrier) for _ in range(WARM_UP_ROUNDS)]
        cpu_s = time.process_time()
        times_ms = [exchange(outgoing, incoming, data, rooms, barrier) for _ in range(rounds)]
        cpu_s = (time.process_time() - cpu_s) / (rounds * part * options.streams / 2**30)
        if (place, rank) == ("0", 0):
            q1, median, q3 = statistics.quantiles(times_ms, n=4)
            print(f"{size // MIB} MiB: {median:.3g} ms ({q1:.3g}-{q3:.3g}), {cpu_s:.2f} CPU s/GiB", flush=True)


def exchange(
    outgoing: Sequence[socket.socket],
    incoming: Sequence[socket.socket],
    data: bytes,
    rooms: Sequence[memoryview],
    barrier: "multiprocessing.synchronize.Barrier",
) -> float:
    """Send and receive at the same time. Return the milliseconds until all ranks of the node have received everything."""
    barrier.wait()
    start_s = time.perf_counter()
    threads = [threading.Thread(target=connection.sendall, args=(data,)) for connection in outgoing]
    threads += [threading.Thread(target=receive, args=each) for each in zip(incoming[1:], rooms[1:], strict=True)]
    for thread in threads:
        thread.start()
    receive(incoming[0], rooms[0])
    for thread in threads:
        thread.join()
    barrier.wait()
    return 1e3 * (time.perf_counter() - start_s)


def receive(connection: socket.socket, room: memoryview) -> None:
    received = 0
    while received < len(room):
        received += connection.recv_into(room[received:])


def accept(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as server:
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()
        return connection


def dial(address: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((address, port), timeout=PATIENCE_S)
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {address}:{port}")


if __name__ == "__main__":
    main()
