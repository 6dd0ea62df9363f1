"""The second half of a reduction, where the first one has failed on a rank."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardnet.backend import Pending
from shardnet.errors import CollectiveError, CollectiveMismatch, PeerLost
from shardnet.fsdp.averages import ReplicaAverages
from shardnet.testing import loopback_cluster

LOST = PeerLost("rank 1 (127.0.0.1:5) lost during reduce_scatter #3 of layer: its connection broke", 1)


@pytest.mark.parametrize("error", [LOST, CollectiveError("no memory left")])
@pytest.mark.parametrize("first", [0, 2])
async def test_replicas_do_not_take_a_failure_within_another_node_for_a_mismatch(error: Exception, first: int) -> None:
    """A mismatch would be the program's fault, and end an elastic training that only one worker is lost to."""

    def half(rank: int) -> Pending[Any]:
        done: Future[Any] = Future()
        if rank == 0:
            done.set_exception(error)
        else:
            done.set_result(torch.ones(6))
        return Pending(done, "reduce_scatter")

    async with loopback_cluster(4) as backends:
        means = {}
        for rank in (first, 2 - first):
            comms: Any = SimpleNamespace(averages=backends[rank].subgroup([0, 2]))
            means[rank] = ReplicaAverages(comms).follow(half(rank), "layer", torch.device("cpu"))
        with pytest.raises(type(error)) as own:
            await means[0]
        with pytest.raises(type(error)) as others:
            await means[2]
    assert own.value is error
    assert not isinstance(others.value, CollectiveMismatch)
    assert getattr(others.value, "rank", None) == getattr(error, "rank", None)
    assert f"all_reduce #0 of layer was aborted by rank 0: {error}" in str(others.value)
