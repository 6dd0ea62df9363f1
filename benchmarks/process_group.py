"""torch's own trainings over shardnet and over gloo: `torchrun --standalone --nproc-per-node 2 benchmarks/process_group.py`.

Both are groups of the same processes, and take turns, so that what else the machine does hits both alike. Medians over the rounds, of
rank 0; a ratio above 1 means that shardnet is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

MIB = 1 << 20
SIZES = (1024, MIB, 16 * MIB, 64 * MIB)
WIDTH, LAYERS, ROWS = 512, 8, 256
Groups = dict[str, dist.ProcessGroup]
Calls = dict[str, Callable[[], object]]  # by the name of a group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank's arithmetic (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("shardnet")
    ours, theirs = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(ours, dist.ProcessGroup)
    assert isinstance(theirs, dist.ProcessGroup)
    groups = {"shardnet": ours, "gloo": theirs}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds{'':24} shardnet ms    gloo ms  ratio")
    for size in SIZES:
        for name, calls in collectives(size, groups).items():
            report(f"{name}, {size / MIB:g} MiB", calls, options.rounds)
    report("a step of DDP", {name: ddp_step(group) for name, group in groups.items()}, options.rounds)
    report("a step of FSDP2", {name: fsdp_step(group) for name, group in groups.items()}, options.rounds)
    dist.destroy_process_group()


def collectives(size: int, groups: Groups) -> dict[str, Calls]:
    """By name and group; `size` is what a rank gives to a gather, and gets from a reduction that is scattered."""
    mine, whole = torch.ones(size // 4), torch.ones(size // 4 * dist.get_world_size())
    return {
        "all_reduce": {name: partial(dist.all_reduce, mine, group=group) for name, group in groups.items()},
        "all_gather": {name: partial(dist.all_gather_into_tensor, whole, mine, group=group) for name, group in groups.items()},
        "reduce_scatter": {name: partial(dist.reduce_scatter_tensor, mine, whole, group=group) for name, group in groups.items()},
    }


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
    )  # 17 million parameters


def ddp_step(group: dist.ProcessGroup) -> Callable[[], None]:
    return step_of(nn.parallel.DistributedDataParallel(model(), process_group=group))


def fsdp_step(group: dist.ProcessGroup) -> Callable[[], None]:
    mesh, sharded = DeviceMesh.from_group(group, "cpu"), model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return step_of(sharded)


def step_of(module: nn.Module) -> Callable[[], None]:
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        module(batch).square().mean().backward()
        module.zero_grad()

    return step


def report(what: str, calls: Calls, rounds: int) -> None:
    """Time all of them in turn, and print a line."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            dist.barrier()
            begin_s = time.perf_counter()
            call()
            if number >= 2:  # the first ones make what the others use
                times[name].append(1e3 * (time.perf_counter() - begin_s))
    ours, theirs = statistics.median(times["shardnet"]), statistics.median(times["gloo"])
    if dist.get_rank() == 0:
        print(f"{what:40} {ours:11.2f} {theirs:10.2f} {theirs / ours:6.2f}", flush=True)


if __name__ == "__main__":
    main()
