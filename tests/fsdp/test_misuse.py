"""Uses of a sharded model that would silently go wrong."""

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.nn.utils import prune

from shardnet.backend import Backend, LoopbackBackend
from shardnet.errors import DtypeError, StateError, UsageError
from shardnet.fsdp import FSDP, AsyncFSDP, ShardingStrategy
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import WIDTH, Layer, Stack, stack_of


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


@contextlib.asynccontextmanager
async def alone() -> AsyncIterator[AsyncFSDP]:
    (backend,) = LoopbackBackend.create_group(1)
    async with AsyncFSDP(Stack(), backend, units=[Layer]) as model:
        yield model
    await backend.aclose()


def new_head(stack: Stack) -> str:
    stack.head = nn.Linear(WIDTH, 2)
    return r"head\.weight"


def new_parameter(stack: Stack) -> str:
    stack.layer(1).scale = nn.Parameter(torch.ones(WIDTH))
    return r"layers\.1\.scale"


def adapter(stack: Stack) -> str:
    stack.layer(2).linear.adapter = nn.Linear(WIDTH, 1)
    return r"layers\.2\.linear\.adapter\.weight"


@pytest.mark.parametrize("change", [new_head, new_parameter, adapter])
@pytest.mark.parametrize("use", [lambda model: model(batch()), FSDP.full_state_dict, FSDP.sharded_state_dict])
def test_parameters_that_came_later_are_refused(change: Callable[[Stack], str], use: Callable[[FSDP], object]) -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        model(batch()).sum().backward()
        name = change(stack_of(model))
        with pytest.raises(StateError, match=rf"^{name} was added to the model after the model was sharded, .* shard it again \("):
            use(model)

    run_ranks(2, work)


def test_what_came_later_without_new_parameters_is_not() -> None:
    def work(backend: Backend) -> None:
        stack, ignored = Stack(), nn.Linear(WIDTH, WIDTH)
        model = FSDP(nn.Sequential(stack, nn.Identity(), ignored), backend, units=[Layer], ignored_modules=[ignored])
        ignored.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))  # is its owner's
        model.module.register_module("1", nn.Dropout(0.0))
        stack.head.weight = stack.head.weight
        prune.identity(stack.layer(0).linear, "bias")  # type: ignore[no-untyped-call]  # the same parameter by another name
        stack.twice = stack.head
        model.full_state_dict()

    run_ranks(1, work)


def test_an_unwrapped_model_is_not_called_as_if_it_were_not() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        module = model.unwrap()
        with pytest.raises(StateError, match=r"this FSDP was unwrapped: call the module that unwrap\(\) returned"):
            model(batch())
        module(batch()).sum().backward()

    run_ranks(2, work)


def test_what_is_no_backend_is_told() -> None:
    with pytest.raises(UsageError, match=r"^backend must be a Backend, such as `cluster\.backend`, got a value of type Stack$"):
        FSDP(Stack(), Stack())  # type: ignore[arg-type]  # that is the misuse


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam])
async def test_optimizers_that_look_beyond_elements_are_refused(kind: Callable[..., torch.optim.Optimizer]) -> None:
    async with alone() as model:
        for step in (model.step, lambda optimizer: model.run(model.step_in_backward, optimizer)):
            with pytest.raises(UsageError, match=r"^(LBFGS|Adafactor|SparseAdam) cannot step sharded parameters, such as those of "):
                await step(kind(model.parameters()))


@pytest.mark.parametrize("called", ["the model", "the module inside", "a unit", "a part of the root"])
def test_functional_calls_are_refused(called: str) -> None:
    """They put other parameters into the module for a moment, and gathering would overwrite those, too."""

    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        stack, own = stack_of(model), model(batch())
        prefix, module = {
            "the model": ("module.", model),
            "the module inside": ("", stack),
            "a unit": ("", stack.layer(0)),
            "a part of the root": ("", stack.head),
        }[called]
        inside = {"a unit": "layers.0.", "a part of the root": "head."}.get(called, "")
        full = {name.removeprefix(inside): value for name, value in model.full_state_dict().items() if name.startswith(inside)}
        given = {f"{prefix}{name}": torch.ones_like(value) for name, value in full.items()}
        assert given
        with pytest.raises(StateError, match=r"was added to the model after the model was sharded.* \(torch\.func\.functional_call, which"):
            torch.func.functional_call(module, given, (batch(),))
        assert all((value == 1).all() for value in given.values())
        assert torch.equal(model(batch()), own)
        with model.summon_full_params():  # everything is whole
            torch.func.functional_call(module, given, (batch(),))

    run_ranks(2, work)


async def test_a_step_before_the_reduction_is_refused() -> None:
    async with alone() as model:
        optimizer, others = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(nn.Linear(1, 1).parameters())
        with model.no_sync():
            await model.backward((await model(batch())).sum())
        with pytest.raises(
            StateError, match=r"no_sync\(\) are not reduced yet, so the optimizer has none to step with.* call sync_gradients\(\) before"
        ):
            await model.step(optimizer)
        await model.step(others)
        await model.run(model.fsdp.sync_gradients)
        await model.step(optimizer)


async def test_another_optimizer_than_those_that_step_in_backward_is_refused() -> None:
    async with alone() as model:
        first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
        model.step_in_backward(first)
        await model.backward((await model(batch())).sum())
        await model.step(first)  # has nothing to do
        wrapper = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapper.param_groups = first.param_groups  # wrappers share those of the optimizer that they wrap
        await model.step(wrapper)
        await model.step(torch.optim.SGD(nn.Linear(1, 1).parameters()))
        with pytest.raises(UsageError, match=r"given to step_in_backward\(\), and this optimizer is not among them"):
            await model.step(second)
        model.step_in_backward(second)
        await model.step(second)


async def test_a_scaler_that_looks_at_slices_alone_is_refused() -> None:
    async with alone() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(
            UsageError,
            match=r"torch\.amp\.grad_scaler\.GradScaler decides on each rank alone, .*; use shardnet\.fsdp\.GradScaler\(backend\)",
        ):
            await model.step(optimizer, torch.amp.GradScaler("cpu"))
        await model.step(optimizer, torch.amp.GradScaler("cpu", enabled=False))


def test_state_that_does_not_fit_is_named() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("another error")

    def work(backend: Backend) -> None:
        async def train() -> None:
            async with AsyncFSDP(Stack(), backend, units=[Layer]) as model:
                whole = torch.optim.Adam(Stack().parameters())
                for parameter in whole.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                whole.step()
                optimizer = torch.optim.Adam(model.parameters())
                optimizer.load_state_dict(whole.state_dict())
                await model.backward((await model(batch())).sum())
                with pytest.raises(
                    StateError, match=r"the optimizer state 'exp_avg' of a parameter of .* has shape .*, but this rank's slice has shape \["
                ):
                    await model.step(optimizer)
                other = torch.optim.SGD(model.parameters())
                other.register_step_pre_hook(fails)
                with pytest.raises(RuntimeError, match="another error"):
                    await model.step(other)

        asyncio.run(train())

    run_ranks(2, work)


async def test_a_sharded_model_is_not_copied_and_not_converted() -> None:
    async with alone() as model:
        with pytest.raises(StateError, match="cannot be copied or pickled"):
            pickle.dumps(model)
        with pytest.raises(AttributeError, match=r"cannot be moved or converted: call \.half\(\) on the module before you shard it"):
            model.half  # noqa: B018


async def test_names_of_the_model_inside_are_pointed_at_by_async_models() -> None:
    async with alone() as model:
        for name, where in (("named_parameters", "fsdp"), ("unwrap", "fsdp"), ("head", r"fsdp\.module")):
            with pytest.raises(AttributeError, match=rf"has no attribute '{name}', but its \w+ has: use model\.{where}\.{name}; if it"):
                getattr(model, name)
        with pytest.raises(AttributeError, match="object has no attribute 'no_such'"):
            model.no_such  # noqa: B018


async def test_a_parameter_that_is_a_buffer_as_well_is_refused() -> None:
    layer = nn.Linear(4, 3)
    layer.register_buffer("kept", layer.weight)
    (backend,) = LoopbackBackend.create_group(1)
    with pytest.raises(UsageError, match=r"the parameter 0\.weight is also the buffer 0\.kept"):
        FSDP(nn.Sequential(layer), backend)
    FSDP(nn.Sequential(layer), backend, ignored_modules=[layer])
    await backend.aclose()


def test_parameters_that_cannot_be_sharded_are_named() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match=r"0\.weight is a lazy parameter without a shape: call the module once"):
            FSDP(nn.Sequential(nn.LazyLinear(3)), backend)
        turned = nn.Linear(2, 2, dtype=torch.cfloat)
        with pytest.raises(
            DtypeError,
            match=r"1\.weight is complex64, and complex .* store it as real numbers \(torch\.view_as_real\), or .* ignored_modules",
        ):
            FSDP(nn.Sequential(nn.Linear(2, 2), turned), backend)
        FSDP(nn.Sequential(nn.Linear(2, 2), turned), backend, ignored_modules=[turned])

    run_ranks(1, work)


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.float64])
def test_buffers_may_have_any_dtype(dtype: torch.dtype) -> None:
    def work(backend: Backend) -> list[torch.Tensor]:
        module = nn.Linear(2, 2)
        for name, shape in (("scalar", ()), ("turns", (3, 2)), ("none", (0, 2))):
            module.register_buffer(name, torch.full(shape, 1 - backend.rank).to(dtype))
        module.register_buffer("columns", torch.full((2, 3), 1 - backend.rank).to(dtype).T, persistent=False)
        return [(buffer.real if buffer.is_complex() else buffer).float() for buffer in FSDP(module, backend).buffers()]

    for buffers in run_ranks(2, work):
        assert all(bool((buffer == 1).all()) for buffer in buffers)
        assert [list(buffer.shape) for buffer in buffers] == [[], [3, 2], [0, 2], [3, 2]]


TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "vmap": lambda model: torch.func.vmap(model)(batch()),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(batch()),
    "jacrev": lambda model: torch.func.jacrev(model)(batch()),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_transforms_of_functions(transform: Callable[[nn.Module], object], strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> torch.Tensor:
        model = FSDP(Stack(), backend, units=[Layer], strategy=strategy)
        for _ in range(2):
            with pytest.raises(StateError, match=r"is called by a transform of torch\.func .*; vmap works within summon_full_params\(\)"):
                transform(model)
            model(batch()).sum().backward()
        with torch.no_grad():
            TRANSFORMS["vmap"](model)  # it changes nothing that autograd knows of
        with model.summon_full_params():
            TRANSFORMS["vmap"](model.module)
        return model.clip_grad_norm_(1.0)

    assert len({float(norm) for norm in run_ranks(2, work)}) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_tracing() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        with pytest.raises(StateError, match=r"is being traced by torch\.jit, .*: trace the module that unwrap\(\) returns"):
            torch.jit.trace(model, batch())  # type: ignore[no-untyped-call]

    run_ranks(1, work)


def test_loading_by_assignment() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        with pytest.raises(UsageError, match=r"load_state_dict\(\.\.\., assign=True\) is not possible for a sharded model"):
            model.load_state_dict(model.state_dict(), assign=True)

    run_ranks(1, work)


def test_torchs_functions_that_collect_state() -> None:
    """They would save the state of one rank's slices as if it were that of whole parameters."""

    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch()).sum().backward()
        optimizer.step()
        with pytest.raises(StateError, match=r"do not know a sharded model, .*: save its full_state_dict\(\) with torch\.distributed"):
            get_model_state_dict(model)
        with pytest.raises(StateError, match="do not know a sharded model"):
            get_optimizer_state_dict(model, optimizer)
        with pytest.raises(StateError, match="do not know a sharded model"):
            get_state_dict(model, optimizer)

    run_ranks(2, work)
