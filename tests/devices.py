"""The device on which tests make their tensors: SHARDNET_TEST_DEVICE, the CPU where it is not set.

    SHARDNET_TEST_DEVICE=cuda pytest tests/contract tests/fsdp -k loopback

finds what tests/gpu does not look for. Some tests fail then for what they say of the CPU: words of its errors, bits of its
divisions, programs that put tensors on it by themselves.
"""

import os
from collections.abc import Iterator

import pytest
import torch

TEST_DEVICE = torch.device(os.environ.get("SHARDNET_TEST_DEVICE", "cpu"))
# the usual way to find out would keep processes from being forked that use one
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")


@pytest.fixture(autouse=True, scope="session")
def default_device() -> Iterator[None]:
    """What a test makes without naming a device is there."""
    if TEST_DEVICE.type == "cpu":
        yield
    else:
        with TEST_DEVICE:
            yield


def on_test_device(tensor: torch.Tensor) -> torch.Tensor:
    """For random numbers, whose generators are the CPU's, so that they are the same everywhere."""
    return tensor.to(TEST_DEVICE)
