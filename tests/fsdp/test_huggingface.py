"""Models that are not ours: transformers' GPT-2 and Llama are trained, generate text, and are saved and loaded."""

import re
from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from shardnet.backend import Backend
from shardnet.checkpoint import open_weights
from shardnet.errors import CollectiveMismatch, StateError
from shardnet.fsdp import FSDP, MixedPrecision
from shardnet.sharding import ShardingStrategy
from shardnet.zero import ZeroOptimizer
from tests.fsdp.parity import check_against_one_process
from tests.fsdp.ranks import run_ranks
from tests.fsdp.replicas import train_replicas
from tests.fsdp.training import Run, optimizer_for
from tests.training.programs import run_program
from tests.training.workers import Nursery

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy
PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
STRATEGIES = pytest.mark.parametrize("strategy", ShardingStrategy)
FAMILIES = pytest.mark.parametrize("name", ["gpt2", "llama"])
WORLD_SIZE = 4
BFLOAT16 = MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32)


def shard(hf: ModuleType, name: str, backend: Backend, strategy: ShardingStrategy = FULL, **options: Any) -> FSDP:
    """A model with different initial values on every rank, of which only rank 0's count."""
    family, reentrant = hf.FAMILIES[name], options.pop("reentrant", None)
    inner = family.make(seed=backend.rank, reentrant=reentrant)
    return FSDP(inner, backend, units=[family.block], strategy=strategy, intra_node_size=2 if strategy is HYBRID else None, **options)


def train(hf: ModuleType, model: nn.Module, rank: int, world_size: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or optimizer_for(model.parameters())
    losses = []
    for tokens in hf.shares(rank, world_size):
        loss = hf.loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def alone(hf: ModuleType, name: str) -> Run:
    model = hf.FAMILIES[name].make()
    return Run(train(hf, model, 0, 1), model.state_dict())


def check_close(run: Run, reference: Run, tolerance: float) -> None:
    assert list(run.state) == list(reference.state)
    assert run.losses == pytest.approx(reference.losses, rel=0, abs=tolerance)
    for name, value in reference.state.items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=tolerance, msg=name)


# --- training


CHECKPOINTING = {"plain": None, "checkpointed": False, "checkpointed, reentrant": True}
# Each strategy with each way of checkpointing, and each of both with either family.
TRAININGS = [
    pytest.param(name, strategy, CHECKPOINTING[how], id=f"{name}-{strategy}-{how}")
    for name, (strategy, how) in zip(cycle(["gpt2", "llama"]), product(ShardingStrategy, CHECKPOINTING))
]


@pytest.mark.parametrize(("name", "strategy", "reentrant"), TRAININGS)
def test_training_equals_one_process(hf: ModuleType, name: str, strategy: ShardingStrategy, reentrant: bool | None) -> None:
    def work(backend: Backend) -> Run:
        model = shard(hf, name, backend, strategy, reentrant=reentrant)
        return Run(train(hf, model, backend.rank, WORLD_SIZE), model.full_state_dict())

    runs = run_ranks(WORLD_SIZE, work)
    losses = [sum(values) / WORLD_SIZE for values in zip(*(run.losses for run in runs), strict=True)]
    for run in runs:
        check_close(Run(losses, run.state), alone(hf, name), tolerance=1e-5)


@FAMILIES
def test_a_sharded_optimizer_trains_as_one_process(hf: ModuleType, name: str) -> None:
    """ZeRO-1, over the plain module."""

    def work(backend: Backend) -> Run:
        family = hf.FAMILIES[name]
        model = family.make(seed=backend.rank)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, backend, module=model, units=[family.block], lr=3e-3)
        losses = train(hf, model, backend.rank, WORLD_SIZE, optimizer)
        return Run(losses, {key: value.clone() for key, value in model.state_dict().items()})

    runs = run_ranks(WORLD_SIZE, work)
    losses = [sum(values) / WORLD_SIZE for values in zip(*(run.losses for run in runs), strict=True)]
    for run in runs:
        check_close(Run(losses, run.state), alone(hf, name), tolerance=1e-5)


class Cast(nn.Module):
    """A model under BFLOAT16 in one process: parameters are cast for each forward, and so are their gradients back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        cast = {name: parameter.to(BFLOAT16.param_dtype) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, cast, (), inputs)


@cache
def replicas(hf: ModuleType, name: str) -> list[Run]:
    shares = [hf.shares(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    runs = train_replicas(lambda: Cast(hf.FAMILIES[name].make()), shares, hf.loss_of)
    return [Run(run.losses, {name.removeprefix("model."): value for name, value in run.state.items()}) for run in runs]


@STRATEGIES
@FAMILIES
def test_bfloat16_equals_replicas_that_cast(hf: ModuleType, name: str, strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> Run:
        model = shard(hf, name, backend, strategy, mixed_precision=BFLOAT16)
        outputs = model(input_ids=torch.zeros(1, 3, dtype=torch.long))
        assert outputs.logits.dtype == torch.float32
        return Run(train(hf, model, backend.rank, WORLD_SIZE), model.full_state_dict())

    for run, replica in zip(run_ranks(WORLD_SIZE, work), replicas(hf, name), strict=True):
        assert {value.dtype for value in run.state.values()} == {torch.float32}
        check_close(run, replica, tolerance=1e-5)


def test_tied_weights_are_one_parameter(hf: ModuleType) -> None:
    def work(backend: Backend) -> None:
        model = shard(hf, "gpt2", backend)
        train(hf, model, backend.rank, 2)
        inner: Any = model.module
        assert inner.lm_head.weight is inner.transformer.wte.weight
        state = model.full_state_dict()
        assert state["lm_head.weight"] is state["transformer.wte.weight"]

    run_ranks(2, work)


@FAMILIES
def test_outputs_are_the_models_own_and_any_may_be_differentiated(hf: ModuleType, name: str) -> None:
    """Here they are the hidden states between two inner units; layers after these get zeros."""
    family = hf.FAMILIES[name]

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        tokens = next(hf.shares(rank, 2))
        outputs = model(input_ids=tokens, output_hidden_states=True)
        assert type(outputs).__name__.startswith("CausalLMOutputWith")
        assert isinstance(model(input_ids=tokens, return_dict=False), tuple)
        loss: Tensor = outputs.hidden_states[1].square().mean()
        return loss

    check_against_one_process(2, family.make, loss_of, units=[family.block])


# --- generating


@STRATEGIES
@FAMILIES
def test_a_sharded_model_generates(hf: ModuleType, name: str, strategy: ShardingStrategy) -> None:
    expected = hf.generate(hf.FAMILIES[name].make().eval())

    def work(backend: Backend) -> None:
        model = shard(hf, name, backend, strategy).eval()
        assert hf.generate(model.module) == expected
        assert model.memory.full_parameters.current_bytes == 0

    run_ranks(WORLD_SIZE, work)


def test_ranks_that_generate_different_lengths_are_told_so(hf: ModuleType) -> None:
    def work(backend: Backend) -> str:
        model = shard(hf, "llama", backend, prefetch=0).eval()
        with pytest.raises(CollectiveMismatch) as refused:  # noqa: PT012 - either may be the one
            hf.generate(model.module, tokens=2 + backend.rank)
            model.full_state_dict()
        return str(refused.value)

    for message in run_ranks(2, work):
        assert "(state)" in message


def test_methods_of_the_inner_module_are_pointed_at(hf: ModuleType) -> None:
    def work(backend: Backend) -> None:
        model = shard(hf, "llama", backend)
        with pytest.raises(
            AttributeError,
            match=r"'generate', but its LlamaForCausalLM has: use model\.module\.generate; .*, or within summon_full",
        ):
            model.generate()  # type: ignore[operator]
        with pytest.raises(AttributeError, match="no attribute 'no_such'"):
            model.no_such  # noqa: B018

    run_ranks(1, work)


# --- saving and loading


def test_a_model_on_meta_is_read_from_a_folder(hf: ModuleType, tmp_path: Path) -> None:
    """It is in several files; values that are in none of them come from the model's own function."""
    whole = hf.FAMILIES["llama"].make(seed=5)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = hf.loss_of(whole, next(hf.shares(0, 1)))

    def work(backend: Backend) -> None:
        with torch.device("meta"):
            module = hf.make_llama()
        state = open_weights(tmp_path) if backend.rank == 0 else {}
        units = [hf.FAMILIES["llama"].block]
        model = FSDP(module, backend, units=units, initial_state=state, param_init_fn=module._init_weights)
        assert equal(model.full_state_dict(), whole.state_dict())
        torch.testing.assert_close(hf.loss_of(model, next(hf.shares(0, 1))), expected)

    run_ranks(2, work)


@pytest.mark.timeout(120)
def test_the_program_of_the_page(hf: ModuleType, nursery: Nursery, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(program)
    hf.FAMILIES["llama"].make(seed=5).save_pretrained(tmp_path / "pretrained")
    said = run_program(nursery, tmp_path, "run", "--nproc", "2", "train.py", within_s=110.0)
    first, last = (float(loss) for loss in re.findall(r"step \d+: ([\d.]+)", said))
    assert last < first
    tuned = hf.FAMILIES["llama"].architecture.from_pretrained(tmp_path / "tuned")
    for rank in range(2):
        prompt = torch.tensor([[1, 2, 3, 4]]) + rank
        assert f"rank {rank} goes on with {tuned.generate(prompt, max_new_tokens=3 + rank)[0].tolist()}" in said


@pytest.fixture(params=["gpt2", "llama"])
def saved(hf: ModuleType, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, Tensor]]:
    """A trained, sharded model saved as transformers does, with its parameters."""

    def work(backend: Backend) -> dict[str, Tensor]:
        model = shard(hf, request.param, backend)
        train(hf, model, backend.rank, 2)
        state = model.full_state_dict(rank0_only=True)
        if backend.rank == 0:
            model.module.save_pretrained(tmp_path, state_dict=dict(state))  # type: ignore[operator]
        return state

    state, nothing = run_ranks(2, work)
    assert nothing == {}
    return request.param, tmp_path, state


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(value, right[name]) for name, value in left.items())


def test_a_saved_model_is_loaded_by_from_pretrained(hf: ModuleType, saved: tuple[str, Path, dict[str, Tensor]]) -> None:
    name, folder, state = saved
    loaded = hf.FAMILIES[name].architecture.from_pretrained(folder)
    assert equal(loaded.state_dict(), state)
    assert len(hf.generate(loaded)) == 10


def test_a_full_state_dict_is_a_plain_models(hf: ModuleType, saved: tuple[str, Path, dict[str, Tensor]]) -> None:
    """Loading is strict in both directions, into a plain model and from one into a sharded model, through a file of safetensors."""
    from safetensors.torch import load_file, load_model, save_model

    name, folder, state = saved
    plain = hf.FAMILIES[name].make(seed=9)
    plain.load_state_dict(state, strict=True)
    assert equal(plain.state_dict(), state)

    save_model(plain, str(folder / "plain.safetensors"))  # tied weights are stored once
    again = hf.FAMILIES[name].make(seed=8)
    load_model(again, folder / "plain.safetensors", strict=True)
    assert load_file(folder / "plain.safetensors").keys() <= state.keys()

    def work(backend: Backend) -> None:
        model = shard(hf, name, backend)
        model.load_full_state_dict(again.state_dict(), strict=True)
        assert equal(model.full_state_dict(), state)

    run_ranks(2, work)


@pytest.mark.parametrize("save", [lambda model, folder: model.save_pretrained(folder), lambda model, folder: model.state_dict()])
def test_slices_are_not_saved_for_a_model(hf: ModuleType, tmp_path: Path, save: Callable[[nn.Module, Path], object]) -> None:
    def work(backend: Backend) -> None:
        model = shard(hf, "llama", backend)
        with pytest.raises(StateError, match=r"a sharded LlamaForCausalLM would hold this rank's slices, .* full_state_dict\(\)"):
            save(model.module, tmp_path)
        save(model.unwrap(), tmp_path)

    run_ranks(2, work)


def test_an_unwrapped_model_is_a_plain_one(hf: ModuleType) -> None:
    def work(backend: Backend) -> list[int]:
        model = shard(hf, "gpt2", backend)
        train(hf, model, backend.rank, 2)
        plain = model.unwrap().eval()
        count = sum(counter.count for counter in backend.telemetry.ops.values())
        generated: list[int] = hf.generate(plain)
        assert sum(counter.count for counter in backend.telemetry.ops.values()) == count
        return generated

    left, right = run_ranks(2, work)
    assert left == right
