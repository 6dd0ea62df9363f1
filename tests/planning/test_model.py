"""Sizes of models: from a module, and from numbers."""

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import InvalidWorldSizeError, UsageError
from shardnet.fsdp import FSDP
from shardnet.planning import GroupSize, ModelSize, Setting, UnitSize
from tests.fsdp.models import GPT, Block
from tests.fsdp.ranks import run_ranks


def test_a_module_has_the_units_that_fsdp_makes() -> None:
    with torch.device("meta"):
        size = ModelSize.of_module("gpt", GPT(), Block)

    def work(backend: Backend) -> list[list[int]]:
        return [[group.layout.numel for group in unit.groups] for unit in FSDP(GPT(), backend, units=Block).units]

    assert [[group.numel for group in unit.groups] for unit in size.units] == run_ranks(1, work)[0]
    assert [unit.name for unit in size.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert size.numel == sum(parameter.numel() for parameter in GPT().parameters())


def test_parameters_are_grouped_by_dtype_and_training() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5, dtype=torch.bfloat16))
    module[0].bias.requires_grad_(False)
    (root,) = ModelSize.of_module("pair", module).units
    assert root.groups == (GroupSize(6, torch.float32), GroupSize(3, torch.float32, False), GroupSize(20, torch.bfloat16, tensors=2))


def test_units_know_what_is_around_them() -> None:
    root, outer, inner, other = (UnitSize(name, ()) for name in ("", "a.1", "a.1.b", "a.10"))
    assert inner.within(outer)
    assert inner.within(root)
    assert not other.within(outer)
    assert not root.within(root)


def test_equal_layers_share_what_is_not_in_the_root() -> None:
    size = ModelSize.of_sizes(107, 3, root=7)
    assert [unit.numel for unit in size.units] == [7, 34, 33, 33]
    assert ModelSize.of_sizes(10, 2).unit_count == 2


def test_the_sizes_of_gpt_2() -> None:
    assert ModelSize.of_transformer(768, 12, 50257 + 1024).numel == 124_439_808  # its 1024 positions count like tokens


@pytest.mark.parametrize(
    ("parameters", "layers", "root", "message"),
    [
        (10, 0, 0, "layers must be at least 1, got 0"),
        (10, 2, 10, "fewer than all 10, got 10"),
        (10, 2, -1, "fewer than all 10, got -1"),
        (10, 11, 0, "10 parameters are too few for 11 layers"),
    ],
)
def test_sizes_that_make_no_sense(parameters: int, layers: int, root: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelSize.of_sizes(parameters, layers, root=root)


def test_models_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="relu has no parameters"):
        ModelSize.of_module("relu", nn.ReLU())
    with pytest.raises(UsageError, match="got 0, 1 and 2"):
        ModelSize.of_transformer(0, 1, 2)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(InvalidWorldSizeError, match="at least 1, got 0"):
        Setting(0)
    for size in (3, 0, -2, 16):
        with pytest.raises(InvalidWorldSizeError, match=f"nodes of {size} ranks do not make a world of 8"):
            Setting(8, node_size=size)
    with pytest.raises(UsageError, match="prefetch must not be negative"):
        Setting(8, prefetch=-1)
    with pytest.raises(UsageError, match="between nodes must be more than 0"):
        Setting(8, between_bytes_per_s=0)
