"""Trainings and operations in the harnesses that torch ships for its own tests: the models and their references are torch's.

`conformance.py` runs them on groups of the backend "shardnet", each in a world of its own.
"""

# torch's harnesses have no types:
# mypy: disable-error-code="no-untyped-call, misc, attr-defined, arg-type, return-value"
# ruff: noqa: PT009 - so that tensors are compared as torch's own tests do it

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestMixin,
    MLPStack,
    NestedWrappedModule,
    TransformerWithSharedParams,
    check_sharded_parity,
)
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestMixin, ModelArgs, Transformer
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir

Tensor = torch.Tensor
common_fsdp.DISTRIBUTED_BACKEND = "shardnet"
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


class Harnesses(FSDPTestMixin, DTensorTestMixin, TestCase):
    """Lives as long as a test; the caller sets `rank`."""

    rank = -1
    temp_dir = ""  # for tests with torch's decorator for it

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def process_group(self) -> Any:
        return dist.group.WORLD

    # --- common_fsdp: FSDP1 against DDP

    def _parity(self, model: type[nn.Module], **options: Any) -> None:
        for strategy, own in itertools.product(STRATEGIES, (False, True)):
            self._test_fsdp_parity(
                *(model, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE),
                **dict(options, sharding_strategy=strategy, use_orig_params=own, device_id=torch.device("cpu")),
            )

    def test_fsdp_nested_modules(self) -> None:
        self._parity(NestedWrappedModule)

    def test_fsdp_nested_modules_prefetched(self) -> None:
        self._parity(NestedWrappedModule, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True)

    def test_fsdp_transformer_with_shared_parameters(self) -> None:
        self._parity(TransformerWithSharedParams)

    # --- common_fsdp: FSDP2 against one process

    def test_fully_shard_parity(self) -> None:
        for reshard in (True, False, self.world_size):
            torch.manual_seed(42)
            model = MLPStack(8)
            alone = deepcopy(model)
            for layer in model:
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone))
            for step in range(4):
                batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(self.world_size)]
                for optimizer in (ours, theirs):
                    optimizer.zero_grad()
                model(batches[self.rank]).sum().backward()
                torch.stack([alone(batch).sum() for batch in batches]).mean().backward()
                check_sharded_parity(self, alone, model)
                for optimizer in (ours, theirs):
                    optimizer.step()
            check_sharded_parity(self, alone, model)

    # --- common_dtensor: operations and tensor parallelism against one process

    def _ops(self, cases: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        for op, arguments in cases:
            self._test_op(mesh, op, *arguments)

    def test_dtensor_pointwise_and_reductions(self) -> None:
        torch.manual_seed(1)
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        self._ops(
            [
                *((op, (x, y)) for op in (torch.add, torch.sub, torch.mul, torch.maximum)),
                *((op, (x,)) for op in (torch.exp, torch.nn.functional.gelu, torch.tanh)),
                *((op, (x,)) for op in (torch.sum, torch.mean, torch.amax, torch.amin)),
                *((op, (x, dim)) for op in (torch.sum, torch.mean, torch.amax) for dim in (0, 1)),
                (torch.softmax, (x, -1)),
                (torch.nn.functional.layer_norm, (x, (6,))),
            ]
        )

    def test_dtensor_matrices_and_views(self) -> None:
        torch.manual_seed(2)
        x, y, z = torch.randn(8, 6), torch.randn(6, 4), torch.randn(4, 8, 6)
        self._ops(
            [
                *(
                    (torch.mm, (x, y)),
                    (torch.matmul, (z, y)),
                    (torch.addmm, (torch.randn(8, 4), x, y)),
                    (torch.bmm, (z, z.transpose(1, 2))),
                ),
                *((torch.transpose, (x, 0, 1)), (torch.t, (x,)), (torch.reshape, (z, (32, 6)))),
                (torch.nn.functional.embedding, (torch.randint(0, 8, (4, 5)), x)),
            ]
        )

    def test_dtensor_redistributes(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        whole = torch.arange(7.0 * 5 * 3).view(7, 5, 3)
        for before, after in itertools.permutations([Replicate(), Shard(0), Shard(1), Shard(2)], 2):
            moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            self.assertEqual(moved.placements, (after,))
            self.assertEqual(moved.full_tensor(), whole)

    @sdpa_kernel(SDPBackend.MATH)  # torch shards no other attention on a CPU, and this one makes its mask itself
    @implicit_replication()
    def test_tensor_parallel_transformer(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        for sequence_parallel in (False, True):
            torch.manual_seed(5)
            alone = Transformer(ModelArgs(dropout_p=0.0))
            model = Transformer.parallelize(deepcopy(alone), mesh, sequence_parallel)
            tokens = torch.randint(0, 8, (4, 16), generator=torch.Generator().manual_seed(3))
            ours, theirs = (torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, alone))
            for _ in range(3):
                self.assertEqual(model(tokens), alone(tokens))
                for each, optimizer in ((model, ours), (alone, theirs)):
                    each(tokens).logsumexp(-1).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for (name, sharded), (_, whole) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
                full = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
                self.assertEqual(full, whole, msg=name)

    # --- checkpoint_utils: what torch saves of sharded models, loads

    @with_temp_dir
    def test_checkpoint_of_fully_sharded_model(self) -> None:
        def sharded(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            model = MLPStack(8)
            for layer in model:
                fully_shard(layer)
            return fully_shard(model)

        first, second = sharded(1), sharded(2)
        saved = get_model_state_dict(first)
        dcp.save({"model": saved}, checkpoint_id=self.temp_dir)
        loaded = {"model": get_model_state_dict(second)}
        dcp.load(loaded, checkpoint_id=self.temp_dir)
        set_model_state_dict(second, loaded["model"])
        for (name, mine), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
            self.assertEqual(mine.full_tensor(), theirs.full_tensor(), msg=name)

    @with_temp_dir
    def test_checkpoint_loads_into_another_sharding(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        whole = torch.arange(12.0 * 6).view(12, 6)
        dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=self.temp_dir)
        target = {"weight": distribute_tensor(torch.zeros(12, 6), mesh, [Shard(1)])}
        dcp.load(target, checkpoint_id=self.temp_dir)
        self.assertEqual(target["weight"].full_tensor(), whole)
