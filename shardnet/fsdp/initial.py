"""The first contents: rank 0's parameters and buffers on every rank."""

from collections.abc import Iterable

import torch
from torch import nn

from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.ignored import IgnoredModules

Tensor = torch.Tensor
ROOT = 0  # the rank whose initial values count


def shard_from_root(groups: Iterable[FlatGroup], comms: Communicators) -> None:
    """Spread rank 0's parameters and keep this rank's part of each; one group at a time, to bound memory. A collective."""
    for group in groups:
        spread_from_root(group, group.flatten() if comms.everyone.rank == ROOT else group.shard.new_empty(group.layout.numel), comms)


def spread_from_root(group: FlatGroup, flat: Tensor, comms: Communicators) -> None:
    """Keep this rank's part of rank 0's `flat` [N], which may be overwritten, and freed afterwards. A collective."""
    # with the digest ranks whose models differ are told so, also where the number of elements is the same
    label = f"{group.label} (initial, layout {group.layout.digest})"
    whole = comms.wait(comms.everyone.broadcast_on_node(flat, ROOT, label=label), f"initial {group.label}")
    group.adopt(whole.tensor)
    whole.release()


def copy_buffers_from_root(module: nn.Module, comms: Communicators, ignored: IgnoredModules | None = None) -> None:
    """Overwrite every buffer with rank 0's, also those that are not in the state_dict. A collective."""
    for name, buffer in module.named_buffers():
        if ignored is not None and buffer in ignored.buffers:
            continue
        content = buffer.detach().resolve_conj().resolve_neg().contiguous()
        pending = comms.everyone.broadcast(content.view(-1).view(torch.uint8), ROOT, label=f"buffer {name} (initial)")  # of any dtype
        with torch.no_grad():
            buffer.copy_(comms.wait(pending, f"initial {name}").view(content.dtype).view(content.shape))
