"""ZeRO-1 and gradient scaling on a GPU."""

import math

import pytest
import torch

import shardnet
from shardnet.fsdp import GradScaler, MixedPrecision
from shardnet.testing import ClusterRunner
from shardnet.zero import ZeroOptimizer
from shardnet.zero.gathers import AT_ONCE
from tests.devices import needs_gpu
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES

pytestmark = [needs_gpu, pytest.mark.timeout(150)]

STEPS = 4
A_WHILE = 200_000_000  # cycles of the GPU: about a tenth of a second


def train_alone() -> dict[str, torch.Tensor]:
    model = make_gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in token_batches(STEPS, SAMPLES).cuda():
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


async def shard_the_optimizer(cluster: shardnet.Cluster) -> float:
    """Train; return the largest difference between a parameter and that of one process."""
    model = make_gpt().cuda()
    share = SAMPLES // cluster.world_size

    def train() -> None:
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, backend=cluster.backend, lr=3e-3)
        for batch in token_batches(STEPS, SAMPLES).cuda():
            with optimizer.last_backward():
                loss_of(model, batch[cluster.rank * share :][:share]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()

    train()
    return max(float((mine - whole).detach().abs().max()) for mine, whole in zip(model.parameters(), train_alone().values(), strict=True))


def test_the_optimizer_alone_is_sharded(cluster: ClusterRunner) -> None:
    assert max(cluster.run(shard_the_optimizer, 2, processes=True, timeout_s=80)) < 2e-5


async def train_on_a_stream_of_its_own(cluster: shardnet.Cluster) -> float:
    """The same where the GPU steps long after the loop thread has started the gathers, and the next forward follows at once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    share = SAMPLES // cluster.world_size
    with torch.cuda.stream(stream):
        model = make_gpt().cuda()
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, backend=cluster.backend, module=model, units=[Block], bucket_bytes=4096, lr=3e-3
        )
        assert len(optimizer._sharded.buckets) > AT_ONCE
        optimizer._require_inner().register_step_pre_hook(lambda *_: torch.cuda._sleep(A_WHILE))  # type: ignore[no-untyped-call]
        for batch in token_batches(STEPS, SAMPLES).cuda():
            loss_of(model, batch[cluster.rank * share :][:share]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        found = [parameter.detach().cpu() for parameter in model.parameters()]
    return max(float((mine - whole.detach().cpu()).abs().max()) for mine, whole in zip(found, train_alone().values(), strict=True))


def test_gathers_follow_the_step_on_a_stream_of_its_own(cluster: ClusterRunner) -> None:
    assert max(cluster.run(train_on_a_stream_of_its_own, 2, processes=True, timeout_s=80)) < 2e-5


async def scale_gradients(cluster: shardnet.Cluster) -> tuple[float, bool, bool]:
    """The scale after a step in which one rank overflows and one more, whether the first was skipped, and whether the second was not."""
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = await cluster.shard(make_gpt().cuda(), units=[Block], mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(cluster.backend, device="cuda", init_scale=64.0)
    skipped = []
    for overflows in (cluster.rank == 1, False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = await model.run(loss_of, model.fsdp, token_batches(1, 4)[0].cuda())
        await model.backward(scaler.scale(loss * (math.inf if overflows else 1.0)))
        await model.step(optimizer, scaler)
        optimizer.zero_grad()
        skipped.append(all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)))
    return scaler.get_scale(), skipped[0], not skipped[1]


def test_an_overflow_on_one_rank_skips_the_step_on_all(cluster: ClusterRunner) -> None:
    assert cluster.run(scale_gradients, 2, processes=True, timeout_s=80) == [(32.0, True, True)] * 2
