"""`Setting`: where and how a model will be trained."""

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from shardnet.errors import InvalidWorldSizeError, UsageError
from shardnet.fsdp import Compression, MixedPrecision
from shardnet.fsdp.compressed.codec import Codec
from shardnet.fsdp.precision import Dtypes
from shardnet.fsdp.resharding import Resharding
from shardnet.planning.model import GroupSize, ModelSize
from shardnet.sharding import ShardingStrategy, shard_sizes


class Strategy(StrEnum):
    """What can be planned: the strategies of FSDP, and ZeRO-1, which is a `ZeroOptimizer` over a plain module."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    HYBRID_SHARD = "hybrid_shard"
    ZERO_1 = "zero_1"
    NO_SHARD = "no_shard"

    @property
    def sends_shards(self) -> bool:
        """Whether it has shards that FSDP gathers and reduces, and so may compress."""
        return self not in (Strategy.ZERO_1, Strategy.NO_SHARD)


class OptimizerKind(StrEnum):
    """Kinds of optimizers, by what is kept for each parameter besides the parameter itself."""

    ADAMW = "adamw"  # two moments, and a step counter per tensor
    SGD_MOMENTUM = "sgd-momentum"
    SGD = "sgd"

    @property
    def moments(self) -> int:
        return {"adamw": 2, "sgd-momentum": 1, "sgd": 0}[self]

    @property
    def counter_bytes(self) -> int:
        """Bytes for each parameter tensor, whatever its size: torch keeps AdamW's step as a float32."""
        return 4 if self is OptimizerKind.ADAMW else 0


@dataclass(frozen=True, slots=True)
class Setting:
    """The ranks, the links between them, and the training's choices.

    `compute_dtype` is the dtype that parameters are gathered and used in (None: the one they are kept in), `reduce_dtype` the
    one that gradients are reduced in (None: the one that parameters are gathered in). `compression`, `reshard_after_forward`
    and `cpu_offload` are those of `FSDP`. Speeds are in bytes per second: `inside` from one rank to the others in its node,
    `between` from a whole node to the other nodes; None: no times are planned.
    """

    world_size: int
    node_size: int | None = None  # ranks of a node; None: all are in one
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    prefetch: int = 1
    compression: Compression = field(default_factory=Compression)
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False
    elastic: bool = False
    inside_bytes_per_s: float | None = None
    between_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidWorldSizeError(f"world size must be at least 1, got {self.world_size}")
        if self.node_size is not None and (self.node_size < 1 or self.world_size % self.node_size):
            raise InvalidWorldSizeError(
                f"nodes of {self.node_size} ranks do not make a world of {self.world_size}: the node size must divide the world size"
            )
        if self.prefetch < 0:
            raise UsageError(f"prefetch must not be negative, got {self.prefetch}")
        for name, speed in (("inside", self.inside_bytes_per_s), ("between", self.between_bytes_per_s)):
            if speed is not None and not 0 < speed < float("inf"):
                raise UsageError(f"the speed {name} nodes must be more than 0, got {speed:g} bytes/s")

    @property
    def ranks_per_node(self) -> int:
        return self.world_size if self.node_size is None else self.node_size

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def mixed(self) -> bool:
        """Whether parameters or gradients change their dtype on the way."""
        return self.compute_dtype is not None or self.reduce_dtype is not None

    def shards(self, strategy: Strategy) -> int:
        """The number of ranks that the parameters are spread over."""
        match strategy:
            case Strategy.FULL_SHARD | Strategy.SHARD_GRAD_OP:
                return self.world_size
            case Strategy.HYBRID_SHARD:
                return self.ranks_per_node
            case Strategy.ZERO_1 | Strategy.NO_SHARD:
                return 1

    def compute(self, group: GroupSize) -> torch.dtype:
        """The dtype in which a group is gathered and used."""
        return self.compute_dtype if self.compute_dtype is not None and group.dtype.is_floating_point else group.dtype

    def reduce(self, group: GroupSize) -> torch.dtype:
        """The dtype in which a group's gradients are reduced, and added up where they are sent compressed."""
        return self._dtypes(group).reduce

    def gathered_twice(self, model: ModelSize, strategy: Strategy) -> range:
        """Which units, by index, are gathered again for backward: the root and the last `prefetch` units are held until then."""
        return range(0) if self.resharding(strategy).keep else range(1, len(model.units) - self.prefetch)

    def resharding(self, strategy: Strategy) -> Resharding:
        """What becomes of full parameters between forward and backward. Raises UsageError where FSDP does, and for ZeRO-1."""
        if strategy is not Strategy.ZERO_1:
            return Resharding.chosen(self.reshard_after_forward, ShardingStrategy(strategy), self.shards(strategy))
        if self.reshard_after_forward is not None:
            raise UsageError(
                f"reshard_after_forward={self.reshard_after_forward}: with ZeRO-1 the module is whole on every rank; leave it out"
            )
        return Resharding(keep=True)

    def offloads(self, strategy: Strategy) -> bool:
        """Whether shards are in the CPU's memory. Raises UsageError for ZeRO-1, which is no strategy of FSDP."""
        if self.cpu_offload and strategy is Strategy.ZERO_1:
            raise UsageError("cpu_offload: with ZeRO-1 the module is whole on every rank; choose a strategy of FSDP, or leave it out")
        return self.cpu_offload

    def compression_under(self, strategy: Strategy) -> Compression:
        """The compression that applies. Raises UsageError and DtypeError where FSDP does; strategies that send no shards have none."""
        if not strategy.sends_shards:
            return Compression()
        precision = MixedPrecision(self.compute_dtype, self.reduce_dtype)
        return self.compression.chosen(ShardingStrategy(strategy), self.shards(strategy), precision)

    def sums_on_nodes(self, strategy: Strategy) -> bool:
        """Whether nodes add up gradients before these are sent compressed ([Note: sums inside nodes]); they do so only where no GPU
        computes."""
        across = 1 < self.ranks_per_node < self.shards(strategy)
        return across and self.compression_under(strategy).gradients is not None and not self.cpu_offload

    def weight_codec(self, group: GroupSize) -> Codec | None:
        """How a group's parameters are gathered; None: as they are."""
        return self.compression.weight_codec(self._dtypes(group))

    def gradient_codec(self, group: GroupSize) -> Codec | None:
        """How a group's gradients are reduced; None: as they are."""
        return self.compression.gradient_codec(self._dtypes(group))

    def _dtypes(self, group: GroupSize) -> Dtypes:
        compute = self.compute(group)
        reduce = self.reduce_dtype if self.reduce_dtype is not None and group.dtype.is_floating_point else compute
        return self.compression.dtypes(Dtypes(group.dtype, compute, reduce))


def packed_bytes(codec: Codec, group: GroupSize, shards: int, every: int = 1) -> int:
    """The packed bytes of all shards of a group together, or of the first one and each `every`-th after it."""
    return sum(map(codec.size, shard_sizes(group.numel, shards)[::every])) * codec.wire_dtype.itemsize
