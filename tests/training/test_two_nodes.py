"""Two machines with two workers each, as far as the kernel can tell: `shardnet run` in two network namespaces, and their traffic."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardnet.credentials import Role
from shardnet.credentials.folder import save
from shardnet.testing.namespaces import INTERFACE, Namespace
from tests.credentials.made import credentials
from tests.networks import nodes_or_skip

PATIENCE_S = 45.0
COUNT = 1_000_000  # 4 MB: more than one chunk
LEAST_BYTES = 4 * COUNT * 2  # that a node must send: half of the data to gather it, half to reduce it, all of it to do both
WORKER = f"""
import json
import torch
import shardnet
from shardnet.testing import reference

async def main():
    async with shardnet.connect() as cluster:
        backend, rank = cluster.backend, cluster.rank
        inputs = [torch.arange({COUNT}, dtype=torch.float32) % 1000 + each for each in range(cluster.world_size)]
        part = {COUNT} // cluster.world_size
        print(json.dumps({{
            "rank": rank,
            "address": cluster.topology.me.address.split(":")[0],
            "shares memory with": sorted(cluster.telemetry.memory_peers),
            "all_gather": torch.equal(
                await backend.all_gather(inputs[rank][:part]), reference.all_gather([each[:part] for each in inputs])[rank]
            ),
            "reduce_scatter": torch.equal(await backend.reduce_scatter(inputs[rank]), reference.reduce_scatter(inputs)[rank]),
            "all_reduce": torch.equal(await backend.all_reduce(inputs[rank]), reference.all_reduce(inputs)[rank]),
        }}))

shardnet.run(main)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("protection", [pytest.param("--insecure", marks=pytest.mark.faults), "--certs"])
def test_collectives_cross_nodes_and_memory_stays_inside_them(protection: str, tmp_path: Path) -> None:
    """With certificates, each machine and the rendezvous has its own."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    with nodes_or_skip(2) as network, ExitStack() as stack:
        roles = {network.hub: Role.RENDEZVOUS, **dict.fromkeys(network.nodes, Role.WORKER)}
        options = {node: protected(node.name, role, tmp_path, protection) for node, role in roles.items()}
        meeting = f"{network.hub.address}:7000"
        rendezvous = stack.enter_context(started(network.hub, "rendezvous", "--listen", meeting, *options[network.hub]))
        stack.callback(rendezvous.kill)
        launchers = []
        for node in network.nodes:
            arguments = f"run --nproc 2 --nnodes 2 --node {node.name} --rendezvous {meeting}".split()
            launchers.append(stack.enter_context(started(node, *arguments, *options[node], str(program))))
            stack.callback(launchers[-1].kill)
        outputs = [launcher.communicate(timeout=PATIENCE_S) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
        sent = [bytes_sent(node) for node in network.nodes]
    # headers and acknowledgements come on top; around a ring of four ranks it would be 1.5 times as much
    assert all(LEAST_BYTES < each < 1.15 * LEAST_BYTES for each in sent), sent
    told = sorted((json.loads(line.partition("] ")[2]) for out, _ in outputs for line in out.splitlines()), key=lambda each: each["rank"])
    right = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), True)
    neighbours = [1, 0, 3, 2]
    addresses = [told[rank]["address"] for rank in (0, 0, 2, 2)]  # it is not determined which node has the first two ranks
    assert told == [
        {"rank": rank, "address": addresses[rank], "shares memory with": [neighbours[rank]], **right} for rank in range(len(neighbours))
    ]
    assert {*addresses} == {node.address for node in network.nodes}


def protected(name: str, role: Role, directory: Path, protection: str) -> tuple[str, ...]:
    """The options for one machine; this makes the files that they name."""
    if protection == "--insecure":
        return ("--insecure",)
    save(credentials(name, role, job="default" if role is Role.WORKER else None), directory / name)
    return "--certs", str(directory / name)


def bytes_sent(node: Namespace) -> int:
    """How many bytes have left a node over its link since the link exists."""
    command = node.command("ip", "-s", "-j", "link", "show", INTERFACE)
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return int(link["stats64"]["tx"]["bytes"])


def started(where: Namespace, *arguments: str) -> "subprocess.Popen[str]":
    """The `shardnet` command on one node."""
    command = where.command(sys.executable, "-m", "shardnet.cli", *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
