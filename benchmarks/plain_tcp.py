"""What plain TCP takes between nodes of two ranks at 1 Gbit/s, without shardnet: `python -m benchmarks.plain_tcp`, as root.

Each process and its counterpart on the other node send each other what an all_gather makes them send, on a connection for each way, as
shardnet's are. No rank waits for another one but at the end of a round, for those of its node. The time is that of one process.
"""

import multiprocessing
import multiprocessing.synchronize
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress

from benchmarks.plan import Topology
from shardnet.config import MIB
from shardnet.testing.namespaces import bridged_nodes

RANKS = 2  # of a node
ROUNDS = {1 * MIB: 150, 16 * MIB: 30, 64 * MIB: 10}  # by bytes of the whole tensor
WARM_UP_ROUNDS = 3
PORT = 9000
PATIENCE_S = 20.0


def main() -> None:
    with bridged_nodes(2, rate=Topology.NETNS_1GBIT.rate) as network:
        address = network.nodes[0].address
        commands = (
            node.command(sys.executable, "-m", "benchmarks.plain_tcp", str(place), address) for place, node in enumerate(network.nodes)
        )
        nodes = [subprocess.Popen(command) for command in commands]
        sys.exit(max(node.wait() for node in nodes))


def run_node(place: int, address: str) -> None:
    """One of the two nodes, to its end; the first one listens at the address."""
    barrier = multiprocessing.Barrier(RANKS)
    ranks = [multiprocessing.Process(target=run_rank, args=(place, address, rank, barrier)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_rank(place: int, address: str, rank: int, barrier: "multiprocessing.synchronize.Barrier") -> None:
    ports = [PORT + 2 * rank, PORT + 2 * rank + 1]
    connections = [accept(address, port) if place == 0 else dial(address, port) for port in ports]
    outgoing, incoming = connections if place == 0 else reversed(connections)
    for size, rounds in ROUNDS.items():
        data, room = bytes(size // (2 * RANKS)), memoryview(bytearray(size // (2 * RANKS)))
        times_ms = [exchange(outgoing, incoming, data, room, barrier) for _ in range(WARM_UP_ROUNDS + rounds)][WARM_UP_ROUNDS:]
        if place == rank == 0:
            q1, median, q3 = statistics.quantiles(times_ms, n=4)
            print(f"{size // MIB} MiB: {median:.3g} ms ({q1:.3g}-{q3:.3g})", flush=True)


def exchange(
    outgoing: socket.socket, incoming: socket.socket, data: bytes, room: memoryview, barrier: "multiprocessing.synchronize.Barrier"
) -> float:
    """Send and receive at once. Returns the milliseconds until all ranks of the node have what they get."""
    barrier.wait()
    start_s = time.perf_counter()
    sending = threading.Thread(target=outgoing.sendall, args=(data,))
    sending.start()
    received = 0
    while received < len(room):
        received += incoming.recv_into(room[received:])
    sending.join()
    barrier.wait()
    return 1e3 * (time.perf_counter() - start_s)


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
    if len(sys.argv) == 3:
        run_node(int(sys.argv[1]), sys.argv[2])
    else:
        main()
