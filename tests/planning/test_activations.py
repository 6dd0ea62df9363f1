"""What a forward keeps for backward, without memory and in a real one."""

import logging

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardnet.errors import UsageError
from shardnet.planning import activation_bytes
from tests.fsdp.models import GPT


def saved_for_real(module: nn.Module, inputs: torch.Tensor) -> int:
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.Tensor] = {}
    with saved_tensors_hooks(lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor):
        module(inputs)
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in known)


def test_every_storage_counts_once_and_parameters_do_not() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    # the input, and the result of ReLU: it is saved by ReLU and by the Linear after it
    assert activation_bytes(net, [torch.empty(5, 8, device="meta")]) == 4 * (5 * 8 + 5 * 16)


def test_a_transformer_keeps_without_memory_what_it_keeps_for_real() -> None:
    with torch.device("meta"):
        model = GPT()
    planned = activation_bytes(model, [torch.empty(4, 12, dtype=torch.int64, device="meta")])
    assert planned == saved_for_real(GPT(), torch.zeros(4, 12, dtype=torch.int64))


def test_nothing_is_kept_of_what_is_frozen() -> None:
    with torch.device("meta"):
        net = nn.Linear(8, 16).requires_grad_(False)
    assert activation_bytes(net, [torch.empty(5, 8, device="meta")]) == 0


def test_an_input_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """What torch logs about it besides the error is not shown to the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    with torch.device("meta"):
        net = nn.Linear(8, 16)
    with pytest.raises(UsageError, match=r"forward failed on input \[5, 9\] float32: RuntimeError: "):
        activation_bytes(net, [torch.empty(5, 9, device="meta")])
    assert not caplog.messages
    logger.error("heard again")
    assert set(caplog.messages) == {"heard again"}
    logger.removeHandler(caplog.handler)
