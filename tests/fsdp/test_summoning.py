"""`summon_full_params`: all parameters are whole for a while, for code other than the training's own forward."""

import asyncio
import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import ClosedError, StateError
from shardnet.fsdp import FSDP, AsyncFSDP, Compression, MixedPrecision
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest, check_gradients
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, stack_of

Tensor = torch.Tensor
_made = Stack()


def make() -> Stack:
    """The same model in all threads."""
    return copy.deepcopy(_made)


def batch(rank: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def sharded(backend: Backend, **options: object) -> FSDP:
    return FSDP(make(), backend, units=[Layer], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_within_it_parameters_are_whole_and_behind_it_slices(world_size: int, strategy: ShardingStrategy) -> None:
    whole = make().state_dict()
    node = {"intra_node_size": max(1, world_size // 2)} if strategy is ShardingStrategy.HYBRID_SHARD else {}

    def work(backend: Backend) -> None:
        model = sharded(backend, strategy=strategy, **node)
        originals = list(model.parameters())
        with model.summon_full_params():
            assert all(torch.equal(parameter, whole[name]) for name, parameter in model.named_parameters())
            assert torch.equal(stack_of(model).head.weight, whole["head.weight"])
        check_at_rest(model)
        assert all(one is other for one, other in zip(model.parameters(), originals, strict=True))

    run_ranks(world_size, work)


def test_each_rank_computes_what_it_likes_and_as_often() -> None:
    alone = make()

    def work(backend: Backend) -> None:
        model = sharded(backend)
        stack = stack_of(model)
        with model.summon_full_params():
            for _ in range(2 * backend.rank):
                torch.testing.assert_close(model(batch()), alone(batch()))
            if backend.rank == 1:  # parts, also those that are no units
                torch.testing.assert_close(stack.head(stack.layer(2)(batch())), stack_of(alone).head(stack_of(alone).layer(2)(batch())))
            assert not model(batch()).requires_grad
        check_at_rest(model)

    run_ranks(3, work)


def test_they_are_what_forward_computes_with() -> None:
    def work(backend: Backend) -> None:
        model = sharded(backend, mixed_precision=MixedPrecision(torch.bfloat16))
        with torch.no_grad():
            expected = model(batch())
        with model.summon_full_params():
            assert stack_of(model).head.weight.dtype == torch.bfloat16
            assert torch.equal(model(batch()), expected)
        packed = sharded(backend, compression=Compression(weights="int8"))
        with torch.no_grad():
            expected = packed(batch())
        with packed.summon_full_params():
            assert torch.equal(packed(batch()), expected)

    run_ranks(2, work)


def between_forward_and_backward(model: FSDP, rank: int) -> None:
    loss = model(batch(rank)).square().mean()
    with model.summon_full_params():
        model(batch())
    loss.backward()


def before_accumulated(model: FSDP, rank: int) -> None:
    with model.no_sync():
        model(batch(rank)).square().mean().backward()
    with model.summon_full_params():
        pass
    model.sync_gradients()


def after_a_prefetch(model: FSDP, rank: int) -> None:
    model.prefetch_forward_params()
    with model.summon_full_params():
        model(batch())
    assert not model.has_pending_prefetch
    model(batch(rank)).square().mean().backward()


def refused(model: FSDP, rank: int) -> None:
    with model.summon_full_params():
        with torch.enable_grad(), pytest.raises(StateError, match=r"Stack: summon_full_params\(\) is for computing without grad"):
            model(batch())
        model(batch())  # it is still whole
    model(batch(rank)).square().mean().backward()


def backward_refused(model: FSDP, rank: int) -> None:
    loss = model(batch(rank)).square().mean()
    with model.summon_full_params():
        with torch.enable_grad():
            part = stack_of(model).head(batch()).sum()
        with pytest.raises(StateError, match=r"backward\(\) cannot be called within summon_full_params\(\), where parameters are whole"):
            loss.backward()
        assert not part.requires_grad
        model(batch())
    model(batch(rank)).square().mean().backward()


def failed(model: FSDP, rank: int) -> None:
    with pytest.raises(ArithmeticError), model.summon_full_params():
        raise ArithmeticError
    model(batch(rank)).square().mean().backward()


def failed_in_the_model(model: FSDP, rank: int) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with model.summon_full_params():
        handle = stack_of(model).layer(1).register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        handle.remove()
        if rank == 1:
            model(batch())
    model(batch(rank)).square().mean().backward()


def one_within_another(model: FSDP, rank: int) -> None:
    with model.summon_full_params():
        with model.summon_full_params():
            pass
        assert stack_of(model).head.weight.dim() == 2
    model(batch(rank)).square().mean().backward()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize(
    "train",
    [
        *(between_forward_and_backward, before_accumulated, refused, backward_refused),
        *(failed, failed_in_the_model, one_within_another),
    ],
)
def test_the_gradients_are_those_without_it(train: Callable[[FSDP, int], None], strategy: ShardingStrategy) -> None:
    check_training(train, strategy)


def test_what_was_prefetched_is_gathered_anew() -> None:
    check_training(after_a_prefetch, ShardingStrategy.FULL_SHARD)


def check_training(train: Callable[[FSDP, int], None], strategy: ShardingStrategy) -> None:
    alone = make()
    torch.stack([alone(batch(rank)).square().mean() for rank in range(2)]).mean().backward()  # type: ignore[no-untyped-call]

    def work(backend: Backend) -> None:
        model = sharded(backend, strategy=strategy)
        train(model, backend.rank)
        check_at_rest(model)
        check_gradients(model, alone, backend.rank)

    run_ranks(2, work)


def test_with_steps_in_backward() -> None:
    def train(model: FSDP, rank: int, *, summons: bool) -> dict[str, Tensor]:
        model.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            if summons:
                with model.summon_full_params():
                    model(batch())
            model(batch(rank)).square().mean().backward()
        return model.full_state_dict()

    def work(backend: Backend) -> None:
        first, second = (train(sharded(backend), backend.rank, summons=summons) for summons in (False, True))
        assert all(torch.equal(first[name], second[name]) for name in first)

    run_ranks(2, work)


def test_what_wants_slices_is_refused_within_it_and_states_are_not() -> None:
    whole = make().state_dict()

    def work(backend: Backend) -> None:
        model = sharded(backend)
        slices = model.sharded_state_dict()
        with model.summon_full_params():
            assert all(torch.equal(value, whole[name]) for name, value in model.full_state_dict().items())
            assert all(torch.equal(value, slices.shards[name]) for name, value in model.sharded_state_dict().shards.items())
            for call in (
                *(model.prefetch_forward_params, model.broadcast_updated_params, model.sync_gradients, model.step_in_backward),
                *(lambda: model.clip_grad_norm_(1.0), lambda: model.update_shards(torch.zeros(3))),
                *(lambda: model.load_full_state_dict(whole), lambda: model.load_sharded_state_dict(slices)),
            ):
                with pytest.raises(StateError, match=r"\w+\(\) cannot be called within summon_full_params\(\), .*: leave it first"):
                    call()
            with pytest.raises(StateError, match="or the copies that forward computes with: call full_state_dict"):
                stack_of(model).state_dict()
        check_at_rest(model)

    run_ranks(2, work)


def test_it_is_not_for_within_a_forward() -> None:
    def work(backend: Backend) -> None:
        model = sharded(backend)

        def summon(*_: object) -> None:
            with model.summon_full_params():
                pass

        handle = stack_of(model).layer(1).register_forward_pre_hook(summon)
        with pytest.raises(StateError, match=r"summon_full_params\(\) was called within a forward or backward; call it before or after"):
            model(batch())
        handle.remove()
        check_at_rest(model)
        model(batch()).sum().backward()

    run_ranks(2, work)


def test_settled_within_it_a_model_is_as_before() -> None:
    def work(backend: Backend) -> None:
        model = sharded(backend)
        with model.summon_full_params():
            model.settle()
            check_at_rest(model)
            model(batch())
        check_at_rest(model)

    run_ranks(2, work)


def test_a_failing_gather_leaves_slices() -> None:
    def work(backend: Backend) -> None:
        model = sharded(backend)
        backend.barrier().wait()
        backend.abort()
        with pytest.raises(ClosedError), model.summon_full_params():
            pytest.fail("it was entered")
        check_at_rest(model)

    run_ranks(2, work)


async def test_in_an_async_program_it_is_for_a_function_on_the_compute_thread() -> None:
    alone = make()
    backends = LoopbackBackend.create_group(2)

    async def rank(backend: Backend) -> None:
        async with AsyncFSDP(make(), backend, units=[Layer]) as model:

            def work() -> Tensor:
                with model.fsdp.summon_full_params():
                    out: Tensor = stack_of(model.fsdp)(batch())
                return out

            torch.testing.assert_close(await model.run(work), alone(batch()))
            await model.backward((await model(batch())).mean())

    await asyncio.gather(*map(rank, backends))
    await asyncio.gather(*(backend.aclose() for backend in backends))


def test_an_encoder_may_be_called_alone_and_ranks_generate_different_lengths(hf: ModuleType) -> None:
    expected = [hf.generate(hf.make_t5().eval(), tokens) for tokens in (3, 6)]

    def work(backend: Backend) -> None:
        model = FSDP(hf.make_t5().eval(), backend, units=lambda _, module: type(module).__name__ == "T5Block")
        with model.summon_full_params():
            assert hf.generate(model.module, 3 * (1 + backend.rank)) == expected[backend.rank]
        check_at_rest(model)

    run_ranks(2, work)
