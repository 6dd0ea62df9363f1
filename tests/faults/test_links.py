"""Bad links: slow, far, lossy, and ends that vanish without a word. Each rank is a process in a network namespace of its own."""

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import psutil
import pytest

from shardnet.testing.namespaces import Namespace, Network
from tests.faults.ledger import SEED, scenario
from tests.faults.links import HALF_OPEN, SAID, WATCHING
from tests.networks import nodes_or_skip
from tests.rendezvous.process import rendezvous_process
from tests.training.workers import PATIENCE_S, Nursery, Worker

MIB = 2**20
RANKS = 3
RATE, BYTES_PER_S = "100mbit", 12.5e6
BOUND, IN_FLIGHT_BYTES = 1.3, 4 * MIB  # promised: a step's time, as a multiple of its bytes' time on the link; for one link
CUT_S, BASE_S = 4.5, 10.0
LOSS_S = float(os.environ.get("SHARDNET_FAULT_LOSS_S", "60"))
MUCH = 20  # percent of lost packets at which a worker may be lost, too
LEAST_ROUNDS = 5
STRANGERS = (*SAID, WATCHING)
SLACK = 2  # descriptors that come and go in a busy process
WORKER_PORT, RELAY_PORT = 7100, 7200


def enrol(stack: ExitStack, nursery: Nursery, network: Network, address: str, ranks: int = RANKS) -> list[Worker]:
    """Start workers, each in its own namespace, that have no task yet."""
    return [stack.enter_context(Worker(nursery, address, node.name)) for node in network.nodes[:ranks]]


def tell(workers: Sequence[Worker], network: Network, *, advertised: Sequence[str] = (), **work: object) -> None:
    """Let them join, and wait until they have."""
    for number, (worker, node) in enumerate(zip(workers, network.nodes, strict=False)):
        settings: dict[str, object] = {"insecure": True, "listen": f"{node.address}:{WORKER_PORT}"}
        if advertised:
            settings["advertise"] = advertised[number]
        worker.tell(job="links", world_size=len(workers), node=node.name, settings=settings, **work)
    for worker in workers:
        worker.hear("joined")


@contextmanager
def process(nursery: Nursery, function: str, *arguments: str) -> Iterator[tuple[int, str]]:
    """Start a helper process; yield its pid and the line that it prints when it is ready. It ends when its stdin does, or is killed."""
    stdin, ours = os.pipe()
    answers, stdout = os.pipe()
    try:
        pid = nursery.fork(function, *arguments, descriptors=(stdin, stdout))
    finally:
        os.close(stdin)
        os.close(stdout)
    try:
        assert select.select([answers], [], [], PATIENCE_S)[0], f"{function} did not start"
        yield pid, os.read(answers, 4096).decode().strip()
    finally:
        os.close(ours)
        os.close(answers)
        nursery.wait_or_kill(pid, PATIENCE_S)


@pytest.mark.faults
@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_a_slow_link_is_full_and_nobody_is_taken_for_dead(nursery: Nursery, latency_s: float) -> None:
    """100 Mbit/s at each node, and `latency_s` more seconds on the way to each."""
    with ExitStack() as stack:
        network = stack.enter_context(nodes_or_skip(RANKS, rate=RATE))
        _, address = stack.enter_context(rendezvous_process(f"{network.hub.address}:7000", namespace=network.hub))
        figures = stack.enter_context(scenario(f"{RATE}, + {latency_s * 1e3:g} ms"))
        advertised = []
        for node in network.nodes if latency_s else ():
            arguments = (node.name, f"{node.address}:{RELAY_PORT}", f"{node.address}:{WORKER_PORT}", str(latency_s))
            advertised.append(stack.enter_context(process(nursery, "tests.faults.links:relay", *arguments))[1])
        workers = enrol(stack, nursery, network, address)
        tell(workers, network, advertised=advertised, work="call", function="tests.faults.links:train", arguments=[1536, 4, 4])
        left = [worker.hear("left", within_s=300.0) for worker in workers]
        assert [(each["error"], each["leaks"]) for each in left] == [(None, [])] * RANKS, left
        said = [each["result"] for each in left]
        for step in range(1, 4):  # the first step warms up
            bound_s = max(each["sent"][step] for each in said) / BYTES_PER_S
            took_s = max(each["seconds"][step] for each in said)
            print(f"+ {latency_s * 1e3:g} ms: step {took_s:.2f} s, bound {bound_s:.2f} s, {took_s / bound_s:.2f} x", flush=True)
            figures.resumed_s.append(took_s / bound_s)
            assert took_s > 0.9 * bound_s, "the link was not slow"
        in_flight = max(each["in_flight"] for each in said)
        waiting = max(each["waiting"] for each in said)
        print(f"at most {in_flight} bytes in flight on a link, and {waiting} that wait for it", flush=True)
        figures.repeats = 3
        figures.parameters_equal = len({each["total"] for each in said}) == 1
        assert figures.parameters_equal
        assert max(figures.resumed_s) <= BOUND
        assert in_flight <= IN_FLIGHT_BYTES
        assert [worker.end() for worker in workers] == [0] * RANKS


@pytest.mark.parametrize(
    ("percent", "seconds"),
    [(5, 3.0), pytest.param(5, LOSS_S, marks=pytest.mark.faults), pytest.param(20, LOSS_S, marks=pytest.mark.faults)],
)
def test_packets_are_lost(nursery: Nursery, percent: int, seconds: float) -> None:
    """Packets to each node and to the rendezvous are lost. With 20 % a worker may be lost; results are right in any case."""
    with ExitStack() as stack:
        if shutil.which("nft") is None:
            pytest.skip("there is no 'nft' to drop packets with (nftables)")
        network, _, _, workers = _streaming(stack, nursery, rows=20_000)
        figures = stack.enter_context(scenario(f"{percent} % of packets lost for {seconds:g} s"))
        with losing([*network.nodes[:RANKS], network.hub], percent) as dropped:
            time.sleep(seconds)  # the fault's own length
            print(f"{percent} %: {dropped()} packets dropped", flush=True)
            assert min(dropped()[:RANKS]) > 0, "nothing was lost"  # the rendezvous receives so few that it may be lucky
            workers[0].tell(stop=True)
            left = [worker.hear("left", within_s=60.0) for worker in workers]
        rounds = [each.get("result", 0) for each in left]
        print(f"{percent} %: {[(each['error'], each['message']) for each in left if each['error']]}, rounds of 8: {rounds}", flush=True)
        # a wrong result would be another error
        assert {each["error"] for each in left} <= ({None} if percent < MUCH else {None, "PeerLost"}), left
        assert all(each["leaks"] == [] for each in left)
        assert min(rounds) > LEAST_ROUNDS or percent >= MUCH, "they stood still"
        figures.repeats = 1


@pytest.mark.faults
def test_a_peer_and_its_network_vanish(nursery: Nursery) -> None:
    """No packet says that it is gone: the others find out and soon give back all that they held for it, and so does the rendezvous."""
    with ExitStack() as stack:
        network, meeting, base, workers = _streaming(stack, nursery, rows=2000)
        figures = stack.enter_context(scenario("a peer's namespace is deleted"))
        lost = workers.pop()
        start = time.monotonic()
        delete(network, RANKS - 1)
        lost.signal(signal.SIGKILL)
        left = [worker.hear("left") for worker in workers]
        assert [(each["error"], each["lost"]) for each in left] == [("PeerLost", lost.rank)] * len(left), left
        # each process holds the same descriptors, tasks and threads as when it joined
        assert all(each["leaks"] == [] for each in left), left
        figures.detected_s = [each["failed_s"] - start for each in left]
        figures.resumed_s = [each["at_s"] - start for each in left]
        _wait_for(lambda: meeting.num_fds() <= base, BASE_S - (time.monotonic() - start))
        print(f"lost after {figures.detected_s} s, all given back after {figures.resumed_s} s", flush=True)
        figures.repeats = 1
        assert max(figures.detected_s) <= CUT_S
        assert max(figures.resumed_s) <= BASE_S
        assert [worker.end() for worker in workers] == [0] * len(workers)


@pytest.mark.faults
@pytest.mark.parametrize("words", STRANGERS)
def test_strangers_vanish_and_leave_connections_half_open(nursery: Nursery, words: str) -> None:
    """Their connections are to a worker and to the rendezvous. Both give back the descriptors within ten seconds; the work goes on."""
    with ExitStack() as stack:
        network, meeting, _, workers = _streaming(stack, nursery, rows=2000)
        figures = stack.enter_context(scenario(f"half-open connections of strangers that have said {words}"))
        processes = [psutil.Process(workers[0].pid), meeting]
        before = [each.num_fds() for each in processes]
        pids = []
        for address, host, base in zip((workers[0].address, f"{network.hub.address}:7000"), processes, before, strict=True):
            pid, held = stack.enter_context(process(nursery, "tests.faults.links:stranger", network.nodes[RANKS].name, address, words))
            assert held == str(HALF_OPEN)
            pids.append(pid)
            _wait_for(partial(_has, host, base + HALF_OPEN // 2), BASE_S)  # the kernel accepts connections before the process does
        delete(network, RANKS)
        start = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        _wait_for(lambda: max(_more(processes, before)) <= SLACK, BASE_S)
        figures.resumed_s.append(time.monotonic() - start)
        workers[0].tell(stop=True)
        left = [worker.hear("left") for worker in workers]
        assert [(each["error"], each["leaks"]) for each in left] == [(None, [])] * RANKS, left
        figures.repeats = 1


def _has(host: psutil.Process, descriptors: int) -> bool:
    return host.num_fds() >= descriptors


def _more(processes: Sequence[psutil.Process], before: Sequence[int]) -> list[int]:
    """How many more descriptors each process has than before."""
    return [each.num_fds() - count for each, count in zip(processes, before, strict=True)]


def delete(network: Network, number: int) -> None:
    """Delete a node's link and its namespace; nothing more comes from there, not even a reset."""
    for command in (network.hub.command("ip", "link", "delete", f"port{number}"), ("ip", "netns", "delete", network.nodes[number].name)):
        subprocess.run(command, check=True, timeout=10)


def _wait_for(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it is not so in time"
        time.sleep(0.05)


def _streaming(stack: ExitStack, nursery: Nursery, *, rows: int) -> tuple[Network, psutil.Process, int, list[Worker]]:
    """A network with one node more than workers, its rendezvous, the descriptors that it had before workers came, and working workers."""
    network = stack.enter_context(nodes_or_skip(RANKS + 1))
    meeting, address = stack.enter_context(rendezvous_process(f"{network.hub.address}:7000", namespace=network.hub))
    base = psutil.Process(meeting.pid).num_fds()
    workers = enrol(stack, nursery, network, address)
    tell(workers, network, work="stream", seed=SEED, rows=rows)
    for worker in workers:
        worker.hear("streaming")
    return network, psutil.Process(meeting.pid), base, workers


@contextmanager
def losing(namespaces: Sequence[Namespace], percent: int) -> Iterator[Callable[[], list[int]]]:
    """Drop packets at random; yield a function that says how many were dropped so far in each namespace."""
    for namespace in namespaces:
        nft(namespace, "add table inet lossy")
        nft(namespace, "add chain inet lossy in { type filter hook input priority 0 ; }")
        nft(namespace, f"add rule inet lossy in iif != lo numgen random mod 100 < {percent} counter drop")
    try:
        yield lambda: [int(re.findall(r"packets (\d+)", nft(each, "list chain inet lossy in"))[0]) for each in namespaces]
    finally:
        for namespace in namespaces:
            nft(namespace, "delete table inet lossy")


def nft(namespace: Namespace, line: str) -> str:
    done = subprocess.run(namespace.command("nft", *line.split()), check=True, timeout=10, capture_output=True, text=True)
    return done.stdout
