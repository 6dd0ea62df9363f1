"""CPU offload, as far as it can be tested without a GPU: what is refused, and that numbers do not depend on where shards are."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, Compression, MixedPrecision, offload
from shardnet.sharding import ShardingStrategy
from tests.devices import TEST_DEVICE
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import optimizer_for

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where these are no mistakes")


@without_gpu
def test_it_is_refused_without_a_gpu() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="this rank has no GPU to compute on"):
            FSDP(make_gpt(), backend, cpu_offload=True)

    run_ranks(1, work)


def test_computing_on_the_cpu_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="but `device` is cpu; leave out `device` or cpu_offload"):
            FSDP(make_gpt(), backend, cpu_offload=True, device="cpu")

    run_ranks(1, work)


def test_a_device_alone_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="this module has memory"):
            FSDP(make_gpt(), backend, device="cpu")

    run_ranks(1, work)


OPTIONS = {
    "full_shard": {},
    "shard_grad_op": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "hybrid_shard": {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2},
    "bfloat16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "int8": {"compression": Compression(weights="int8", gradients="int8")},
    "neighbours": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, size) for name in OPTIONS for size in (1, 4) if size > 1 or name not in ("hybrid_shard", "neighbours")]
)
def test_no_bit_depends_on_it(monkeypatch: pytest.MonkeyPatch, name: str, world_size: int) -> None:
    """The tests' device stands in for a GPU, so that shards are elsewhere only in name."""
    monkeypatch.setattr(offload, "compute_device", lambda module, device: TEST_DEVICE)

    def work(backend: Backend) -> list[dict[str, torch.Tensor]]:
        states = []
        for cpu_offload in (False, True):
            model = FSDP(make_gpt(), backend, units=[Block], cpu_offload=cpu_offload, **OPTIONS[name])  # type: ignore[arg-type]
            optimizer = optimizer_for(model.parameters())
            for batch in token_batches(3, 4):
                with model.no_sync():
                    loss_of(model, batch[:2]).backward()  # type: ignore[no-untyped-call]
                loss_of(model, batch[2:]).backward()  # type: ignore[no-untyped-call]
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            states.append({key: value.cpu() for key, value in model.full_state_dict().items()})
        return states

    for usual, offloaded in run_ranks(world_size, work):
        assert all(torch.equal(value, offloaded[key]) for key, value in usual.items())
