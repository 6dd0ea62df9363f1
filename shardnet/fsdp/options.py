"""`ShardingOptions`: how a module is sharded, for whoever passes it on to `FSDP`."""

from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
from torch import nn

from shardnet.fsdp.compression import Compression
from shardnet.fsdp.meta.initial_values import InitFunction
from shardnet.fsdp.precision import MixedPrecision
from shardnet.sharding import ShardingStrategy


class ShardingOptions(TypedDict, total=False):
    """The keyword arguments of `FSDP` except `units`. `FSDP` says what they mean, and what their defaults are."""

    strategy: ShardingStrategy
    intra_node_size: int | None
    prefetch: int
    mixed_precision: MixedPrecision | None
    reshard_after_forward: bool | int | None
    compression: Compression | None
    ignored_modules: Iterable[nn.Module]
    param_init_fn: InitFunction | None
    initial_state: Mapping[str, torch.Tensor] | None
    device: torch.device | str | None
    cpu_offload: bool
