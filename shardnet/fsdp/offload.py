"""CPU offload: shards, gradients and the optimizer's state in the CPU's memory, units gathered on a GPU.

A gather sends what is in the CPU's memory and fills the GPU's; a reduction takes the GPU's gradients and leaves this rank's part on the
CPU. Without offload all of it would pass through the CPU's memory, too: offload saves gathers the copy from the GPU, and reductions the
copy back to it.
"""

import torch
from torch import nn

from shardnet.errors import UsageError
from shardnet.fsdp.ignored import IgnoredModules


def compute_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device on which a module with shards on the CPU computes. Raises UsageError if that is no GPU, or not the module's own GPU."""
    found = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    if device is None and not found and not torch.cuda.is_available():
        raise UsageError("cpu_offload: this rank has no GPU to compute on, so there is nothing to offload; leave cpu_offload out")
    chosen = torch.device(device) if device is not None else min(found, key=str) if found else torch.device("cuda")
    if chosen == torch.device("cuda"):  # whichever is the current one
        chosen = torch.device("cuda", torch.cuda.current_device())
    if chosen.type != "cuda":
        raise UsageError(f"cpu_offload: units compute on a GPU, but `device` is {chosen}; leave out `device` or cpu_offload")
    if found - {chosen}:
        raise UsageError(
            f"cpu_offload: the module has parameters on {', '.join(map(str, found))}, but would compute on {chosen}; move the whole module "
            "to that GPU or to the CPU"
        )
    return chosen


def move_buffers(module: nn.Module, ignored: IgnoredModules, device: torch.device) -> None:
    """Move buffers to where the module computes, except those of ignored modules."""
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer not in ignored.buffers:
                inner._buffers[key] = buffer.to(device)
