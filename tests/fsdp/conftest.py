"""What the tests of sharded training share."""

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.training.workers import Nursery

START_S = 150  # processes import torch and its compiler, and train; on a machine that is not busy they take far less


def fsdp2_runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, dtype: str) -> Path:
    """The folder with the results of fsdp2_worker.py, whose ranks are real processes. Give a test that waits for it 2 · START_S."""
    return nursery.reference("tests.fsdp.fsdp2_worker:main", partial(tmp_path_factory.mktemp, "fsdp2"), dtype, within_s=START_S)


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """tests/fsdp/huggingface.py."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed: it belongs to the extra `models`")
    return importlib.import_module("tests.fsdp.huggingface")
