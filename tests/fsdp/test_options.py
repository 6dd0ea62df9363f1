"""The options that are passed on to FSDP are all options that it has."""

from typing import get_type_hints

import pytest
from torch import nn

from shardnet.backend import LoopbackBackend
from shardnet.fsdp import FSDP, AsyncFSDP
from shardnet.fsdp.options import ShardingOptions


def test_they_are_what_fsdp_takes() -> None:
    taken = get_type_hints(FSDP.__init__)
    for own in ("self", "module", "backend", "units", "return"):
        taken.pop(own, None)
    assert get_type_hints(ShardingOptions) == taken


async def test_one_that_is_misspelt_is_named() -> None:
    backend = LoopbackBackend.create_group(1)[0]
    with pytest.raises(TypeError, match="prefetched"):
        await AsyncFSDP(nn.Linear(2, 1), backend, prefetched=2)  # type: ignore[call-arg]
