"""The device on which tests make their tensors: SHARDNET_TEST_DEVICE, by default the CPU.

    SHARDNET_TEST_DEVICE=cuda pytest tests/contract tests/fsdp -k loopback

finds bugs that tests/gpu does not look for. Some tests then fail because they expect the CPU: the wording of its errors, the bits of its
divisions, programs that put tensors on it by themselves.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

TEST_DEVICE = torch.device(os.environ.get("SHARDNET_TEST_DEVICE", "cpu"))
# otherwise the check for a GPU would initialise CUDA, and forked processes could not use a GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")


def by_default() -> AbstractContextManager[object]:
    """Within this context, tensors that this thread makes without naming a device are on the test device. For the CPU this does nothing:
    that is torch's default, and naming it would make each call of torch's take longer."""
    return nullcontext() if TEST_DEVICE.type == "cpu" else TEST_DEVICE


@pytest.fixture(autouse=True, scope="session")
def a_thread_each() -> None:
    """Ranks are threads here, and models are small: an operation split among more threads would mostly wait for those threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def default_device() -> Iterator[None]:
    """Tensors that tests make in the thread that runs them are on the test device, too."""
    with by_default():
        yield


def on_test_device(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor there: random numbers come from the CPU's generators, so that they are the same everywhere."""
    return tensor.to(TEST_DEVICE)
