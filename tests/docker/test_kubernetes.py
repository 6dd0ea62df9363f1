"""What docs/schedulers.md says about Kubernetes, with every pod as processes on this machine: the manifests' pods do train."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from shardnet.cli.main import main
from tests.docker.manifests import pod_of_job, pod_of_rendezvous
from tests.docker.pods import Pods
from tests.docs.page import block

# Learns to add. Without an optimizer of torch's, whose first one in a process takes two seconds to import a compiler.
PROGRAM = """\
import shardnet, torch
from shardnet import elastic

async def train(cluster, state):
    torch.manual_seed(0)
    model = await cluster.shard(torch.nn.Linear(8, 1))
    await state.resume(model)
    while state.step < 20:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(state.step))
        loss = ((await model(x) - x.sum(dim=1, keepdim=True)) ** 2).mean()
        await model.backward(loss)
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
        await state.commit(state.step + 1)
    print(f"rank {cluster.rank} of {cluster.world_size}: loss {loss.item():.2f} after {state.step} steps")

shardnet.run(lambda: elastic.run(train))
"""
RENDEZVOUS = ("shardnet-rendezvous-0", pod_of_rendezvous(), "rendezvous")
WORKERS = [(f"training-{index}", pod_of_job(index), "worker") for index in range(2)]


@pytest.mark.timeout(180)  # starts fresh interpreters, maybe on a slow machine
async def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    before, applied, after = block("Kubernetes", "console").partition("$ kubectl apply -f $SHARDNET/docker/kubernetes\n")
    assert applied
    pods = Pods(tmp_path)
    for line in before.splitlines():
        type_in(line, pods)
    async with pods.container(*RENDEZVOUS) as process:
        pods.address = await listens_on(process)
        outputs = await train(pods)
        status, logs = after.splitlines()
        command = status.removeprefix("$ kubectl exec shardnet-rendezvous-0 -- ").split()
        assert "training-8c1f6c1e" in await pods.run(*RENDEZVOUS, command)
    said = [re.findall(r"(rank . of .): loss ([\d.]+) after 20 steps", output) for output in outputs]
    assert [[ranks for ranks, _ in each] for each in said] == [["rank 0 of 2"], ["rank 1 of 2"]]
    assert all(float(loss) < 0.1 for each in said for _, loss in each), said  # untrained it is about 8
    labels = dict(each.split("=") for each in logs.split(" -l ")[1].split(","))
    assert labels.items() <= WORKERS[0][1].labels.items()
    assert (tmp_path / "shardnet-rendezvous-0" / "state" / "rendezvous.db").stat().st_size > 0


def type_in(line: str, pods: Pods) -> None:
    """Do what a line at the prompt does."""
    command, *words = shlex.split(line.removeprefix("$ "))
    if command == "shardnet":
        assert main(words) == 0
        return
    made = re.fullmatch(r"kubectl create (?:secret generic|configmap) (\S+) --from-file=(\S+)", " ".join([command, *words]))
    assert made is not None, line
    path = Path(made[2])
    pods.objects[made[1]] = {each.name: each.read_bytes() for each in (path.iterdir() if path.is_dir() else [path])}


async def listens_on(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    found = re.search(r"listening on (\S+);", (await process.stdout.readline()).decode())
    assert found is not None
    return found[1]


async def train(pods: Pods) -> list[str]:
    """Run the workers, the second one first, and return what they say. Before that come the rendezvous' probe, and their wait for it."""
    name, pod, container = RENDEZVOUS
    probe = pod.container(container)["readinessProbe"]["exec"]["command"]
    first, pod_0, _ = WORKERS[0]
    async with asyncio.TaskGroup() as tasks:
        said = [tasks.create_task(pods.run(name, pod, container, probe)), tasks.create_task(pods.run(first, pod_0, "rendezvous-is-up"))]
    assert [each.result() for each in said] == [f"serving: {pods.address}\n"] * 2
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(pods.run(*worker)) for worker in reversed(WORKERS)]
    return [end.result() for end in reversed(ends)]
