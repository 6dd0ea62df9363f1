"""`shardnet doctor` on three machines, as far as the kernel can tell, of which two do not reach each other in one direction."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from shardnet.testing.namespaces import Namespace
from tests.networks import nodes_or_skip
from tests.rendezvous.process import rendezvous_process

PATIENCE_S = 120.0


@pytest.mark.faults
@pytest.mark.timeout(180)
def test_a_pair_that_cannot_connect_is_named_on_every_machine() -> None:
    """Only `here` cannot open connections to `there`; the other way they work, as with a firewall that lets replies through."""
    with nodes_or_skip(3) as network, ExitStack() as stack:
        _, here, there = network.nodes
        _, meeting = stack.enter_context(rendezvous_process(f"{network.hub.address}:7000", namespace=network.hub))
        drop_connections(here, there)
        doctors = [stack.enter_context(doctor(node, meeting)) for node in network.nodes]
        outputs = [each.communicate(timeout=PATIENCE_S) for each in doctors]
    assert [each.returncode for each in doctors] == [1, 1, 1], outputs
    of_between, of_here, of_there = ([each for each in json.loads(out) if each["topic"] == "peers"] for out, _ in outputs)

    assert [each["level"] for each in of_between] == ["ok", "ok", "problem"]
    assert all("can be reached, answers in " in each["what"] for each in of_between[:2])
    assert f"({here.address}:" in of_between[2]["what"]
    assert f": it cannot reach rank {rank_of(there, of_between)} ({there.address}:" in of_between[2]["what"]

    assert sorted(each["level"] for each in of_here) == ["ok", "problem"]
    (closed,) = (each for each in of_here if each["level"] == "problem")
    assert f"({there.address}:" in closed["what"]
    assert closed["what"].endswith("cannot be reached from this machine: nothing answers within 8 s")
    assert closed["advice"].startswith("let this machine connect to the ports of workers there: is a firewall")

    assert [each["level"] for each in of_there] == ["ok", "ok", "problem"]
    assert f"({here.address}:" in of_there[2]["what"]
    assert f": it cannot reach this machine ({there.address}:" in of_there[2]["what"]
    assert not any("shardnet doctor" in each["what"] + each["advice"] for each in (*of_between, *of_here, *of_there)), "this is it already"


def rank_of(node: Namespace, found: list[dict[str, str]]) -> str:
    """The rank of the doctor on a node, as another doctor that reaches it calls it: "rank 2 (10.99.0.3:41001, …) can be reached, …"."""
    reached = (each["what"].split() for each in found if each["level"] == "ok")
    (rank,) = (words[1] for words in reached if words[2].startswith(f"({node.address}:"))
    return rank


def drop_connections(source: Namespace, target: Namespace) -> None:
    """From now on `source` cannot open connections to `target`, and is not told why."""
    for line in (
        "add table inet cut",
        "add chain inet cut out { type filter hook output priority 0 ; }",
        f"add rule inet cut out ip daddr {target.address} tcp flags & (syn|ack) == syn drop",
    ):
        subprocess.run(source.command("nft", *line.split()), check=True, timeout=10)


@contextmanager
def doctor(node: Namespace, meeting: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = ["doctor", "--rendezvous", meeting, "--insecure", "--workers", "3", "--json"]
    command = ["env", f"SHARDNET_NODE={node.name}", sys.executable, "-m", "shardnet.cli", *arguments]
    with subprocess.Popen(node.command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
