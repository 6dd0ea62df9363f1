"""The device on which tests make their tensors: SHARDNET_TEST_DEVICE, the CPU where it is not set.

    SHARDNET_TEST_DEVICE=cuda pytest tests/contract tests/fsdp -k loopback

finds what tests/gpu does not look for. Some tests fail then for what they say of the CPU: words of its errors, bits of its
divisions, programs that put tensors on it by themselves.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

TEST_DEVICE = torch.device(os.environ.get("SHARDNET_TEST_DEVICE", "cpu"))
# the usual way to find out would keep processes from being forked that use one
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")


def by_default() -> AbstractContextManager[object]:
    """What this thread makes without naming a device is there. Without a word it is on the CPU, where a word would make each call of
    torch's take longer."""
    return nullcontext() if TEST_DEVICE.type == "cpu" else TEST_DEVICE


@pytest.fixture(autouse=True, scope="session")
def a_thread_each() -> None:
    """Ranks are threads, and the models small: operations that are split among more threads wait for these most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def default_device() -> Iterator[None]:
    """What tests make in the thread that runs them is there, too."""
    with by_default():
        yield


def on_test_device(tensor: torch.Tensor) -> torch.Tensor:
    """For random numbers, whose generators are the CPU's, so that they are the same everywhere."""
    return tensor.to(TEST_DEVICE)
