"""`Compression`: what is sent in fewer bits than it is computed in."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from shardnet.errors import DtypeError, UsageError
from shardnet.fsdp.compressed.codec import Bfloat16Codec, BlockwiseInt8Codec, Codec
from shardnet.fsdp.precision import Dtypes, MixedPrecision
from shardnet.sharding import ShardingStrategy

_SMALLEST_BLOCK = 16  # elements: with fewer, scales would take more than a quarter of a byte for each


@dataclass(frozen=True, slots=True)
class Compression:
    """How a model's parameters and gradients travel between the ranks that share them; None sends them as they are.

    `weights="bfloat16"` gathers parameters in half the bytes of float32, `weights="int8"` in about a quarter, quantized
    block by block (qwZ of ZeRO++, https://arxiv.org/abs/2306.10209). Modules compute in the same dtype as without
    compression, but with the rounded values, which are the same on all ranks, the owner of a shard included. The parameters
    that the optimizer steps, and state dicts, stay exact.

    `gradients="int8"` reduces gradients in about a quarter of the bytes of float32: each rank quantizes the part of its
    gradients that each other rank needs, and the receiver averages the parts in float32 in rank order (as qgZ of ZeRO++).
    Where the ranks are on several nodes, equally many on each, a node first adds up its gradients unquantized, in float32,
    and sends that sum quantized to other nodes: once, however many ranks it has. (On GPUs every rank quantizes its own.)
    HYBRID_SHARD compresses within the node; averages across nodes, and secondary shards, are sent as they are.

    `block` is the number of elements that share a scale (float32, so int8 takes 1/4 + 1/`block` of float32's bytes).

    `residual` is the dtype of the error feedback (https://arxiv.org/abs/1901.09847): what a rank's rounding took from its
    gradients is added to its next ones, so that it arrives later instead of never. It costs every rank memory for ALL
    gradients, not only for its shard of them (on nodes of n ranks that add up first, for 1/n of all): 2 bytes a parameter in
    bfloat16, 4 in float32, kept between steps. With bfloat16, gradients of an element may still be lost if all of them are
    below 1/65000 of the largest in its block. None keeps nothing: the rounding is lost. The residual is in no state dict. It
    has the scale of the loss that it came from: where a `GradScaler` changes that, one step's rounding errors count double
    or half. Where a gradient is not finite its block arrives as NaN, and the block's residual restarts at zero.

    Raises UsageError and DtypeError for invalid values.
    """

    weights: Literal["bfloat16", "int8"] | None = None
    gradients: Literal["int8"] | None = None
    block: int = 256
    residual: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        if self.weights not in (None, "bfloat16", "int8"):
            raise UsageError(f"Compression: weights must be 'bfloat16', 'int8' or None, got {self.weights!r}")
        if self.gradients not in (None, "int8"):
            raise UsageError(f"Compression: gradients must be 'int8' or None, got {self.gradients!r}")
        if type(self.block) is not int or self.block < _SMALLEST_BLOCK:
            raise UsageError(f"Compression: block must be a number of at least {_SMALLEST_BLOCK} elements, got {self.block!r}")
        if self.residual not in (None, torch.bfloat16, torch.float32):
            raise DtypeError(f"Compression: residual must be torch.bfloat16, torch.float32 or None, got {self.residual!r}")

    def chosen(self, strategy: ShardingStrategy, shard_count: int, precision: MixedPrecision) -> "Compression":
        """The compression that applies where `shard_count` ranks share one copy of the parameters: none where one rank has all of them.

        Raises UsageError for NO_SHARD, and for a choice that contradicts the precision.
        """
        if self.weights is None and self.gradients is None:
            return self
        if strategy is ShardingStrategy.NO_SHARD:
            raise UsageError("compression applies to gathers and reductions of shards, and NO_SHARD has no shards; leave compression out")
        if self.weights == "bfloat16" and precision.param_dtype in (torch.bfloat16, torch.float16):
            raise UsageError(
                f"Compression: weights are gathered as {precision.param_dtype} already, by MixedPrecision; leave weights='bfloat16' out"
            )
        if self.gradients is not None and precision.reduce_dtype not in (None, torch.float32):
            raise UsageError(
                f"Compression: gradients sent as {self.gradients} are added up in float32; leave reduce_dtype {precision.reduce_dtype} "
                "out of MixedPrecision"
            )
        return self if shard_count > 1 else Compression()

    def dtypes(self, dtypes: Dtypes) -> Dtypes:
        """The dtypes of a parameter: gradients that will be quantized are not rounded to another dtype first."""
        return dtypes if self.gradient_codec(dtypes) is None else replace(dtypes, reduce=torch.float32)

    def weight_codec(self, dtypes: Dtypes) -> Codec | None:
        """How parameters of these dtypes are gathered; None: as they are, also because they would not get smaller."""
        if self.weights is None or not dtypes.master.is_floating_point:
            return None
        if self.weights == "int8":
            return BlockwiseInt8Codec(self.block)
        return Bfloat16Codec() if dtypes.compute.itemsize > torch.bfloat16.itemsize else None

    def gradient_codec(self, dtypes: Dtypes) -> Codec | None:
        """How gradients of parameters of these dtypes are sent; None: as they are."""
        return BlockwiseInt8Codec(self.block) if self.gradients is not None and dtypes.master.is_floating_point else None
