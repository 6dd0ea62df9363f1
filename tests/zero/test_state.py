"""Saving and loading: a rank's part, all parts together, other world sizes, plain torch, and refusals."""

import io
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardnet.backend import Backend
from shardnet.errors import DtypeError, ProtocolError, SizeMismatchError, StateError, UsageError
from shardnet.zero import Split, ZeroOptimizer, merge_state_dicts
from shardnet.zero.codec import decode, encode
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import Place, make_model

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def make(backend: Backend | None, optimizer_class: Any = optim.AdamW, **choices: Any) -> tuple[nn.Sequential, Any]:
    model = make_model()
    groups: list[dict[str, Any]] = [{"params": list(model[:3].parameters())}, {"params": list(model[4].parameters()), "lr": 0.01}]
    if backend is None:
        return model, optimizer_class(groups, **OPTIONS)
    return model, ZeroOptimizer(groups, optimizer_class, backend, module=model, bucket_bytes=100, **choices, **OPTIONS)


def train(model: nn.Module, optimizer: Any, backend: Backend | None, steps: range) -> None:
    for step in steps:
        Place(backend).loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.wait()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load it again with `weights_only`, which executes no code from the file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Model and optimizer after three steps in one process, and the model after three more."""
    model, optimizer = make(None)
    train(model, optimizer, None, range(3))
    middle = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, None, range(3, 6))
    return middle["model"], middle["optimizer"], model.state_dict()


Alone = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def save(backend: Backend) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = make(backend)
    train(model, optimizer, backend, range(3))
    return through_a_file(optimizer.state_dict()), through_a_file(optimizer.consolidated_state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_consolidated_state_is_the_wrapped_optimizers(alone: Alone, world_size: int) -> None:
    for _, whole in run_ranks(world_size, save):
        torch.testing.assert_close(whole, alone[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_merged_parts_are_the_consolidated_state(world_size: int) -> None:
    saved = run_ranks(world_size, save)
    merged = merge_state_dicts([part for part, _ in reversed(saved)])
    torch.testing.assert_close(merged, saved[0][1], rtol=0, atol=0)


def test_plain_torch_goes_on_from_it(alone: Alone) -> None:
    _, whole = run_ranks(3, save)[0]
    model, optimizer = make(None)
    model.load_state_dict(alone[0])
    optimizer.load_state_dict(whole)
    train(model, optimizer, None, range(3, 6))
    torch.testing.assert_close(model.state_dict(), alone[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("split", Split)
def test_any_world_size_goes_on_from_it(alone: Alone, world_size: int, split: Split) -> None:
    whole = merge_state_dicts([part for part, _ in run_ranks(2, save)])

    def work(backend: Backend) -> None:
        model, optimizer = make(backend, split=split)
        train(model, optimizer, backend, range(10, 11))  # another state, which loading overwrites
        model.load_state_dict(alone[0])
        optimizer.load_state_dict(whole)
        torch.testing.assert_close(optimizer.consolidated_state_dict(), whole, rtol=0, atol=0)
        train(model, optimizer, backend, range(3, 6))
        torch.testing.assert_close(dict(model.state_dict()), dict(alone[2]), rtol=0, atol=1e-6)

    run_ranks(world_size, work)


def test_a_rank_goes_on_from_its_own_part(alone: Alone) -> None:
    parts = [part for part, _ in run_ranks(3, save)]

    def work(backend: Backend) -> None:
        model, optimizer = make(backend)
        model.load_state_dict(alone[0])
        optimizer.load_state_dict(parts[backend.rank])
        train(model, optimizer, backend, range(3, 6))
        torch.testing.assert_close(dict(model.state_dict()), dict(alone[2]), rtol=0, atol=1e-6)

    run_ranks(3, work)


def test_the_state_of_whole_parameters_comes_back_in_any_shape() -> None:
    """Adafactor's state has rows and columns, not the shape of the parameter."""

    def work(backend: Backend) -> dict[str, Any]:
        parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2, 2))]
        optimizer = ZeroOptimizer(parameters, optim.Adafactor, backend)
        for parameter in parameters:
            parameter.grad = torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape)
        optimizer.step()
        whole = optimizer.consolidated_state_dict()
        optimizer.load_state_dict(whole)
        torch.testing.assert_close(optimizer.consolidated_state_dict(), whole, rtol=0, atol=0)
        optim.Adafactor(parameters).load_state_dict(whole)
        return optimizer.state_dict()

    parts = run_ranks(2, work)
    assert sorted(index for part in parts for index in part["state"]) == [0, 1, 2]  # each has one owner
    assert list(merge_state_dicts(parts)["state"][0]) == ["step", "row_var", "col_var"]


def test_the_consolidated_state_can_be_kept_on_rank_0_alone() -> None:
    def work(backend: Backend) -> int:
        model, optimizer = make(backend)
        train(model, optimizer, backend, range(1))
        return len(optimizer.consolidated_state_dict(rank0_only=True))

    assert run_ranks(3, work) == [2, 0, 0]


def test_options_are_loaded_and_used() -> None:
    def work(backend: Backend) -> None:
        _, optimizer = make(backend)
        state = optimizer.consolidated_state_dict()
        state["param_groups"][1]["lr"] = 0.7
        optimizer.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.7]
        assert [group["lr"] for group in optimizer._inner.param_groups] == [0.05, 0.7]

    run_ranks(2, work)


def test_another_ranks_part_is_refused() -> None:
    parts = [part for part, _ in run_ranks(2, save)]

    def other_rank(backend: Backend) -> None:
        with pytest.raises(UsageError, match=r"from rank \d of 2, whose part differs .* merge_state_dicts"):
            make(backend)[1].load_state_dict(parts[1 - backend.rank])

    def other_world(backend: Backend) -> None:
        with pytest.raises(UsageError, match=r"rank 0 of 2, whose part differs from that of rank \d of 3"):
            make(backend)[1].load_state_dict(parts[0])

    run_ranks(2, other_rank)
    run_ranks(3, other_world)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    (first, whole), (second, _) = run_ranks(2, save)
    other = run_ranks(2, lambda backend: make(backend, split=Split.PARAMETERS)[1].state_dict())[1]
    with pytest.raises(UsageError, match=r"ranks 0 to 1, got those of \[0\]"):
        merge_state_dicts([first])
    with pytest.raises(UsageError, match=r"got those of \[0, 0\]"):
        merge_state_dicts([first, first])
    with pytest.raises(UsageError, match="different optimizers, splits or world sizes"):
        merge_state_dicts([first, other])
    for strange in ([], [whole, second]):
        with pytest.raises(UsageError, match="needs the state dicts that ZeroOptimizer"):
            merge_state_dicts(strange)


def test_a_state_with_other_groups_is_refused_as_torch_does() -> None:
    def work(backend: Backend) -> None:
        _, optimizer = make(backend)
        state = optimizer.consolidated_state_dict()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})

    run_ranks(1, work)


def test_the_state_of_other_shapes_is_refused() -> None:
    def work(backend: Backend) -> None:
        _, optimizer = make(backend)
        state = optimizer.consolidated_state_dict()
        state["state"] = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(5, 7), "exp_avg_sq": torch.zeros(7, 5)}}
        with pytest.raises(SizeMismatchError, match=r"\(7, 5\) as the shape of exp_avg of 0.weight but got \(5, 7\)"):
            optimizer.load_state_dict(state)

    run_ranks(1, work)


class TestCodec:
    def test_what_goes_in_comes_out(self) -> None:
        states: dict[int, dict[str, Any]] = {
            3: {"step": torch.tensor(2.0), "flags": torch.tensor([True, False, True]), "half": torch.ones(3, dtype=torch.bfloat16)},
            0: {"empty": torch.empty(0, 2), "count": 7, "rate": 0.1, "name": "x", "nothing": None, "wide": torch.arange(3.0).double()},
            5: {},
        }
        decoded = decode(*encode(states))
        assert list(decoded) == list(states)
        for index, state in states.items():
            assert list(decoded[index]) == list(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(decoded[index][key], value, rtol=0, atol=0)
                else:
                    assert decoded[index][key] == value

    def test_what_cannot_be_sent_is_refused(self) -> None:
        with pytest.raises(UsageError, match="a value of type object cannot be kept or sent, only tensors, numbers, text"):
            encode({0: {"callback": object()}})

    @pytest.mark.parametrize(
        "header",
        [
            b"\xff",
            b"{}",
            b"{}extra",
            b'{"x": {}}',
            b'{"dict": 3}',
            b'{"dict": [[1]]}',
            b'{"tensor": ["float32"]}',
            b'{"tensor": ["load", [1], 0]}',
            b'{"tensor": ["float32", [9], 0]}',
            b'{"tensor": ["float32", [1], -8]}',
            b"[" * 100_000,
        ],
    )
    def test_what_no_rank_sends_is_refused(self, header: bytes) -> None:
        with pytest.raises(ProtocolError):
            decode(torch.frombuffer(bytearray(header), dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8))


def test_dcp_does_not_take_a_part_for_the_whole() -> None:
    """It would save the part without an error, and the rest would be missed only when it is loaded."""

    def work(backend: Backend) -> None:
        model, optimizer = make(backend)
        train(model, optimizer, backend, range(1))
        for whole in (False, True):
            with pytest.raises(StateError, match=r"save its consolidated_state_dict\(\)"):
                get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=whole))

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("parameter", "error", "message"),
    [
        (nn.Parameter(torch.ones(3, dtype=torch.complex64)), DtypeError, "phase is complex64, and complex parameters cannot be sharded"),
        (nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False), DtypeError, "phase is int8, which has no gradient"),
        (nn.UninitializedParameter(), UsageError, "phase is a lazy parameter without a shape: call the module once"),
    ],
    ids=["complex", "integers", "lazy"],
)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(parameter: nn.Parameter, error: type[UsageError], message: str) -> None:
    def work(backend: Backend) -> None:
        module = nn.Module()
        module.phase = parameter
        with pytest.raises(error, match=message):
            ZeroOptimizer(module.named_parameters(), optim.AdamW, backend)

    run_ranks(1, work)
