"""Trainings on GPUs, in turn: `python -m benchmarks.gpu`. Ranks are processes on this machine, which share its GPUs.

    shardnet             FULL_SHARD, over the backend of `connect()`
    shardnet, offload    the same with cpu_offload
    FSDP2 over shardnet  torch's, over `init_process_group("shardnet")`
    FSDP2 over gloo      the same over gloo; one rank alone: over NCCL
    alone                the compute of one rank and nothing else

The same GPT (workers/gpt.py), parameters, data and precision in all of them: bfloat16 to compute in, float32 for parameters, sums of
gradients and AdamW. A step is timed from the first rank's start to the last one's result. Memory is what torch has allocated at the peak of
a step, less what it had allocated before that training was made.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.contestants import Trainer
from benchmarks.machine import describe_machine
from benchmarks.race import Contender, race
from gpt import GPT, Block, GPTConfig, parameter_count
from shardnet import FSDP, Backend
from shardnet.fsdp import MixedPrecision
from shardnet.interop.process_group import ShardnetProcessGroup

TIMEOUT = datetime.timedelta(seconds=120)
MIB = 2**20
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OUTERMOST = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
PRECISION = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: there is no GPU on this machine", file=sys.stderr)
        return 1
    if options.rank is not None:
        measure(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
        return max(abs(process.wait()) for process in ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure trainings on GPUs beside FSDP2, and print Markdown.")
    for name, default, what in (
        ("ranks", 2, "processes"),
        ("steps", 10, "of each training that count"),
        ("dim", 1024, "width of the model"),
        ("layers", 12, "blocks, each of them a unit"),
        ("context", 512, "bytes of a sequence"),
        ("batch", 16, "sequences of a rank"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Measure as one rank."""
    torch.cuda.set_device(options.rank % torch.cuda.device_count())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("shardnet", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks, timeout=TIMEOUT)
    try:
        ours = dist.group.WORLD
        assert isinstance(ours, ShardnetProcessGroup)
        theirs_name = "nccl" if options.ranks == 1 else "gloo"
        theirs = dist.new_group(backend=theirs_name, timeout=TIMEOUT)
        assert isinstance(theirs, dist.ProcessGroup)
        makers: dict[str, Callable[[GPT], nn.Module]] = {
            "shardnet": partial(_ours, ours.backend, cpu_offload=False),
            "shardnet, offload": partial(_ours, ours.backend, cpu_offload=True),
            "FSDP2 over shardnet": partial(_fsdp2, ours),
            f"FSDP2 over {theirs_name}": partial(_fsdp2, theirs),
            "alone": _alone,
        }
        peaks: dict[str, int] = {}
        trainers = [_trainer(name, make, options, peaks) for name, make in makers.items()]
        timings = race([Contender(trainer.name, partial(_step, trainer)) for trainer in trainers], options.steps)
        if options.rank == 0:
            medians = [1e3 * statistics.median(timing.wall_s) for timing in timings]
            print(report(options, trainers, medians, peaks), flush=True)
    finally:
        dist.destroy_process_group()


def report(options: argparse.Namespace, trainers: list[Trainer], medians: list[float], peaks: dict[str, int]) -> str:
    millions = parameter_count(GPT(_config(options))) / 1e6
    lines = [
        f"{torch.cuda.get_device_name()}, {describe_machine()}",
        f"{options.ranks} ranks on {min(options.ranks, torch.cuda.device_count())} GPU, {millions:.1f} million parameters",
        "",
        "| | step, ms | shardnet is ahead by | memory, MiB | loss |",
        "|---|---:|---:|---:|---:|",
    ]
    for trainer, median in zip(trainers, medians, strict=True):
        peak = peaks[trainer.name] / MIB
        lines.append(f"| {trainer.name} | {median:.1f} | {median / medians[0]:.2f} | {peak:,.0f} | {trainer.losses[-1]:.4f} |")
    return "\n".join(lines)


def _trainer(name: str, make: Callable[[GPT], nn.Module], options: argparse.Namespace, peaks: dict[str, int]) -> Trainer:
    """A training after its first two steps, the second of which measures its peak. A collective."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(1)
    batch = torch.randint(256, (options.batch, options.context + 1), generator=torch.Generator().manual_seed(options.rank)).cuda()
    trainer = Trainer(name, make(GPT(_config(options)).cuda()), batch)
    _step(trainer)
    torch.cuda.reset_peak_memory_stats()
    _step(trainer)
    peaks[name] = torch.cuda.max_memory_allocated() - before
    return trainer


def _step(trainer: Trainer) -> None:
    trainer.step()
    torch.cuda.synchronize()


def _config(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(options.dim, options.layers, options.dim // 64, options.context, 0)


def _ours(backend: Backend, model: GPT, *, cpu_offload: bool) -> nn.Module:
    return FSDP(model, backend, units=(Block,), mixed_precision=PRECISION, cpu_offload=cpu_offload)


def _fsdp2(group: dist.ProcessGroup, model: GPT) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cuda")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=OUTERMOST)
    return model


def _alone(model: GPT) -> nn.Module:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                logits: Tensor = self.model(inputs)
            return logits.float()

    return Narrow()


if __name__ == "__main__":
    sys.exit(main())
