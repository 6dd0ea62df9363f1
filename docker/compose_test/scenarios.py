"""What is done to a cluster, and what it must do then. Times are printed and compared with limits.

Limits are above what docs/elastic.md promises. There each worker has a core, and time counts from the fault itself; here it counts
from the request to the engine.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from compose_test import traffic
from compose_test.cluster import NODES, START_S, WORKERS, Cluster
from compose_test.console import Failure, headline, say
from compose_test.engine import run, state
from compose_test.story import Epoch, Line, epoch_of, step_of

HEALTHY_S = 60.0
DEAD_S = 3.0  # a dead node is noticed; promised: 1 s
SILENT_S = 8.0  # a node that is frozen or cut off is noticed; promised: 4.5 s
ON_S = 20.0  # the others go on, counted from then; promised: 5 s
BACK_S = 60.0  # a node that was away trains again, counted from when it could
STARTED_S = 180.0  # the same for a node that was started again: its interpreters compete with those that train
STEPS = 5  # done by all nodes together before the next fault


@dataclass
class Fault:
    """What is done to a node.

    hurt, heal  commands of the engine, to which the container, or the network and the container, is added
    noticed_s   limit for the others to notice
    """

    hurt: tuple[str, ...]
    heal: tuple[str, ...]
    noticed_s: float
    on_network: bool = False

    def command(self, words: tuple[str, ...], cluster: Cluster, container: str) -> list[str]:
        return ["docker", *words, *([cluster.network] if self.on_network else []), container]


PAUSE = Fault(("pause",), ("unpause",), SILENT_S)
DISCONNECT = Fault(("network", "disconnect"), ("network", "connect"), SILENT_S, on_network=True)
KILL = Fault(("kill",), ("start",), DEAD_S)


def plain(cluster: Cluster) -> None:
    """Two nodes train to the end, are healthy meanwhile, and send each byte the way it should go."""
    headline(f"plain: {NODES} nodes of {WORKERS} ranks train to the end")
    begin_s = time.time()
    cluster.up()
    world_s = cluster.wait_for_world(NODES * WORKERS)
    _wait_for_steps(cluster, world_s, 1)
    say(f"all of them train, {time.time() - begin_s:.1f} s after `up`")
    _wait_until_healthy(cluster)
    before, since_s = traffic.read(cluster), time.time()
    _wait_for_steps(cluster, since_s, 6 * STEPS)
    for container, after in traffic.read(cluster).items():
        traffic.check(container, before[container], after)
    _end(cluster)


def faults(cluster: Cluster, wanted: list[str]) -> None:
    """One training that suffers all wanted faults."""
    headline(f"faults: {', '.join(wanted)}")
    cluster.up()
    world_s = cluster.wait_for_world(NODES * WORKERS)
    _wait_for_steps(cluster, world_s, STEPS)
    for name in wanted:
        FAULTS[name](cluster)
    _end(cluster)


def _pause(cluster: Cluster) -> None:
    """A node is frozen, and thaws."""
    _away_and_back(cluster, "pause", PAUSE, cluster.nodes[0])


def _disconnect(cluster: Cluster) -> None:
    """A node's network is taken away, and given back."""
    _away_and_back(cluster, "disconnect", DISCONNECT, cluster.nodes[-1])


def _kill(cluster: Cluster) -> None:
    """A node is killed, and started again."""
    _away_and_back(cluster, "kill", KILL, cluster.nodes[0], back_s=STARTED_S)


def _rendezvous(cluster: Cluster) -> None:
    """The rendezvous is killed: nothing happens. Started again, it knows its workers."""
    rendezvous, before = cluster.rendezvous, len(cluster.story.find(epoch_of))
    fault_s = time.time()
    run("docker", "kill", rendezvous)
    _wait_for_steps(cluster, fault_s, STEPS)
    run("docker", "start", rendezvous)
    workers = _wait_for_members(cluster)
    _wait_for_steps(cluster, time.time(), STEPS)
    if len(cluster.story.find(epoch_of)) > before:
        raise Failure("the loss of the rendezvous has ended an epoch")
    say(f"rendezvous: killed, no step lost; started again it has its {workers} workers, {time.time() - fault_s:.1f} s after")


def _later(cluster: Cluster) -> None:
    """One more container is started later."""
    nodes = len(cluster.nodes) + 1
    begin_s = time.time()
    cluster.up(nodes)
    joined_s = cluster.wait_for_world(nodes * WORKERS, since_s=begin_s, timeout_s=STARTED_S)
    _wait_for_steps(cluster, joined_s, STEPS)
    say(f"later: a node that was started takes part after {joined_s - begin_s:.1f} s, and {nodes * WORKERS} ranks train")


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "pause": _pause,
    "disconnect": _disconnect,
    "kill": _kill,
    "rendezvous": _rendezvous,
    "later": _later,
}


def _away_and_back(cluster: Cluster, name: str, fault: Fault, victim: str, back_s: float = BACK_S) -> None:
    """Take a node away; the others must go on without a loss. Give it back; it must train again."""
    world = len(cluster.nodes) * WORKERS
    fault_s = time.time()
    run(*fault.command(fault.hurt, cluster, victim))
    hurt_s = time.time()  # at the latest: an engine that still writes the image to its disk may need seconds for the command
    on = _wait_for_epoch(cluster, world - WORKERS, fault_s, fault.noticed_s + ON_S, f"{name}: the others go on")
    stood_at = max(cluster.story.find(step_of, until_s=on.at_s))
    _wait_for_steps(cluster, on.at_s, STEPS)
    healed_s = time.time()
    run(*fault.command(fault.heal, cluster, victim))
    cluster.listen()
    back = _wait_for_epoch(cluster, world, healed_s, back_s, f"{name}: the node is back")
    _wait_for_steps(cluster, back.at_s, STEPS)
    noticed_s, lost = on.ended_s - fault_s, max(0, stood_at - on.step)
    say(
        f"{name}: noticed after {noticed_s:.1f} s; the others train again after {on.at_s - fault_s:.1f} s, {on.workers} ranks, behind step "
        f"{on.step}, {lost} committed steps lost; it is back {back.at_s - healed_s:.1f} s after it could be"
    )
    if lost:
        raise Failure(f"{name}: step {stood_at} was committed, and the training went on behind step {on.step}")
    if on.ended_s - hurt_s > fault.noticed_s:
        raise Failure(f"{name}: noticed after {noticed_s:.1f} s, and not within {fault.noticed_s:g} s")


def _wait_for_epoch(cluster: Cluster, workers: int, since_s: float, timeout_s: float, what: str) -> Epoch:
    """The first epoch with `workers` workers; there may be others before it, since the ranks of a node come one by one."""

    def wanted(line: Line) -> Epoch | None:
        epoch = epoch_of(line)
        return epoch if epoch is not None and epoch.workers == workers else None

    return cluster.story.wait(wanted, since_s=since_s, timeout_s=timeout_s, what=what, alive=lambda: cluster.runs)


def _wait_for_steps(cluster: Cluster, since_s: float, count: int) -> None:
    """Wait until `count` steps were done after `since_s`."""
    for _ in range(count):
        since_s = cluster.story.wait(
            lambda line: line.at_s if step_of(line) else None,
            since_s=since_s,
            timeout_s=START_S,
            what="a step is done",
            alive=lambda: cluster.runs,
        )


def _wait_for_members(cluster: Cluster) -> int:
    """Wait until a rendezvous that was away has all workers of its job again; return how many."""
    deadline_s = time.monotonic() + BACK_S
    while time.monotonic() < deadline_s:
        with suppress(Failure, ValueError):  # it does not answer yet, or knows of no job
            job = cluster.status()
            if not job["absent"] and len(job["workers"]) == len(cluster.nodes) * WORKERS:
                return len(job["workers"])
        time.sleep(0.5)
    raise Failure(f"the rendezvous has not its workers back after {BACK_S:g} s")


def _wait_until_healthy(cluster: Cluster) -> None:
    waiting = {cluster.rendezvous, *cluster.nodes}
    deadline_s = time.monotonic() + HEALTHY_S
    while waiting:
        waiting -= {each for each in waiting if state(each)["Health"]["Status"] == "healthy"}
        if time.monotonic() > deadline_s or not cluster.runs:
            raise Failure(f"never healthy while they trained: {', '.join(each[:12] for each in waiting)}")
        time.sleep(0.2)
    say("the rendezvous and all nodes are healthy")


def _end(cluster: Cluster) -> None:
    cluster.end_training()
    cluster.wait_for_end(START_S)
    say(f"trained {max(cluster.story.find(step_of))} steps, and every container has ended with status 0")
