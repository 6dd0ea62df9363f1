"""Whether all ranks have made the same: a model that is sharded in the same way, or an optimizer of the same parameters.

Gathers, reductions and the first broadcast go through different groups ([Note: streams] in communicators.py). So ranks that disagree could
wait for each other in different groups, which nobody would notice before the timeout. Therefore, before anything is sent, the ranks
compare everything that decides what is sent, in a barrier that ranks can pass together only if their labels are the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import zip_longest

import torch
from torch import nn

from shardnet.collectives.reduction import dtype_name
from shardnet.errors import CollectiveMismatch
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.ignored import IgnoredModules
from shardnet.fsdp.placement import UnitPlan
from shardnet.fsdp.precision import MixedPrecision


def check_alike(lines: Iterable[str], comms: Communicators, what: str, advice: str) -> None:
    """Raise CollectiveMismatch on all ranks unless these lines, which describe `what` the ranks have made, are the same on all. A
    collective."""
    text, label = "\n".join(lines).encode(), f"whether {what} are the same"
    try:
        comms.wait(comms.everyone.barrier(label=f"{label} ({blake2b(text, digest_size=8).hexdigest()})"), "agree")
    except CollectiveMismatch:
        others = _gather(text, comms, label)
    else:
        return
    for rank, lines_there in enumerate(others):
        for first, other in zip_longest(others[0], lines_there, fillvalue="nothing more"):
            if first != other:
                where = f"[rank {comms.everyone.rank}/{comms.everyone.world_size}]"
                raise CollectiveMismatch(f"{where} {what} differ: rank 0 has {first}, but rank {rank} has {other}; {advice}")


def _gather(text: bytes, comms: Communicators, label: str) -> list[list[str]]:
    """The lines of all ranks."""
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = comms.wait(comms.everyone.all_gather(torch.tensor(mine.numel(), device="cpu"), label=label), "agree").tolist()
    texts = comms.wait(comms.everyone.all_gather(mine, sizes=sizes, label=label), "agree").split_with_sizes(sizes)
    return [each.numpy().tobytes().decode().split("\n") for each in texts]


def describe_model(
    plans: Sequence[UnitPlan],
    module: nn.Module,
    ignored: IgnoredModules,
    precision: MixedPrecision,
    compression: Compression,
) -> Iterator[str]:
    """The lines of a model: its compression, each unit with its parameters, then buffers."""
    yield str(compression)
    for plan in plans:
        yield f"unit {plan.name}"
        for placed in plan.parameters:
            dtypes, parameter = precision.dtypes(placed.name, placed.parameter), placed.parameter
            kind = f"{dtypes}, reduced as {dtype_name(dtypes.reduce)}" if parameter.requires_grad else f"{dtypes}, frozen"
            yield f"{', '.join(placed.names)} {list(parameter.shape)} in {kind}"
    for name, buffer in module.named_buffers():
        if buffer not in ignored.buffers:
            yield f"buffer {name} {list(buffer.shape)} in {dtype_name(buffer.dtype)}"
