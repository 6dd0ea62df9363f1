"""Groups of several backends, of which shardnet is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from shardnet.errors import ClosedError, StateError, UsageError
from shardnet.interop.mixed import MixedProcessGroup
from shardnet.interop.process_group import ShardnetProcessGroup
from shardnet.interop.registration import register
from tests.interop.mixtures import MIXED
from tests.training.workers import Nursery

# torch's types do not know all that it exports:
# mypy: disable-error-code="attr-defined, arg-type"

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    nursery.call("tests.interop.mixtures:main", str(tmp_path), str(world_size), "as_with_gloo", within_s=55.0)


@pytest.mark.parametrize(
    ("backend", "program"),
    [*((MIXED[0], each) for each in ("conveniences", "ddp", "fsdp1", "fsdp2", "zero", "joined")), (MIXED[2], "ddp"), (MIXED[2], "fsdp2")],
)
def test_programs_run_unchanged(nursery: Nursery, tmp_path: Path, backend: str, program: str) -> None:
    nursery.call("tests.interop.programs:main", str(tmp_path), "2", program, f"BACKEND={backend}", within_s=55.0)


@pytest.mark.parametrize("program", ["groups_of_it", "ended"])
@pytest.mark.parametrize("backend", MIXED[:2])
def test_groups_come_and_go(nursery: Nursery, tmp_path: Path, backend: str, program: str) -> None:
    nursery.call("tests.interop.mixtures:main", str(tmp_path), "3", program, f"BACKEND={backend}", within_s=55.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is to have no GPU")
def test_a_backend_that_cannot_be_made(nursery: Nursery, tmp_path: Path) -> None:
    nursery.call("tests.interop.mixtures:main", str(tmp_path), "2", "one_cannot", within_s=55.0)


@contextmanager
def alone(backend: str, **options: Any) -> Iterator[Any]:
    """The group of a world of one."""
    register()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["cpu:shardnet,cuda:shardnet", "cpu:shardnet"])
def test_shardnet_for_all_devices_is_no_mixture(backend: str) -> None:
    with alone(backend) as group:
        assert isinstance(group, ShardnetProcessGroup)
        mixed, beside = dist.new_group([0], backend=MIXED[0]), dist.new_group([0], backend="gloo")
        assert isinstance(mixed, MixedProcessGroup)
        assert isinstance(beside, dist.ProcessGroup)
        dist.barrier(beside)


def test_what_shardnet_cannot_be_part_of() -> None:
    with pytest.raises(UsageError, match="supports tensors on cpu and cuda; name another backend for xpu"), alone("cpu:gloo,xpu:shardnet"):
        pass
    with alone("gloo"), pytest.raises(StateError, match="needs a default group of backend 'shardnet'"):
        dist.new_group([0], backend=MIXED[0])


def test_who_it_is() -> None:
    with alone(MIXED[0], timeout=timedelta(seconds=7)) as group:
        ours, theirs = group._get_backend(CPU), group._get_backend(GPU)
        assert isinstance(ours, ShardnetProcessGroup)
        assert theirs.name() == "gloo"
        assert (group.name(), dist.get_backend(group), str(dist.get_backend_config(group))) == (MIXED[0],) * 3
        assert sorted(each.type for each in group._device_types) == ["cpu", "cuda"]
        assert group.address == ours.address
        assert group.backend is ours.backend
        with pytest.raises(RuntimeError, match=rf"the group of the backends {MIXED[0]} has no backend for device xpu"):
            group._get_backend(torch.device("xpu"))
        assert ours.options._timeout == theirs.options._timeout == timedelta(seconds=7)
        group.set_timeout(timedelta(seconds=9))
        assert ours.options._timeout == theirs.options._timeout == timedelta(seconds=9)


def test_who_has_the_tensors_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if neither the first argument nor an option says which backend has the tensors."""
    asked: list[str] = []
    with alone(MIXED[0]) as group, monkeypatch.context() as patch:
        patch.setattr(group, "_others", Listener(asked))
        patch.setitem(group._names, "meta", "gloo")
        gpu = torch.empty(2, device="meta")  # stands in for a tensor on a GPU
        group.gather([], [gpu], c10d.GatherOptions())
        group.allgather(output_tensors=[[gpu]], input_tensors=[gpu])
        group.start_coalescing(GPU)
        group.end_coalescing(GPU)
        on_gpu = c10d.BarrierOptions()
        on_gpu.device = torch.device("cuda", 0)
        group.barrier(on_gpu)
        assert asked == ["gather", "allgather", "_start_coalescing", "_end_coalescing", "barrier"]
        called = group._get_sequence_number_for_group()
        group.barrier().wait()
        group.barrier(timeout=timedelta(seconds=5)).wait()
        assert group._get_sequence_number_for_group() == called + 2
        with pytest.raises(
            UsageError, match=r"allreduce_coalesced needs at least one tensor, whose device chooses among the backends cpu:shardnet,"
        ):
            group.allreduce_coalesced([])


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_both_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    asked: list[str] = []
    with alone(MIXED[0]) as group, monkeypatch.context() as patch:
        patch.setattr(group, "_others", Listener(asked))
        getattr(group, end)()
        assert asked == [end]
        with pytest.raises(ClosedError):
            group.barrier().wait()


class Listener:
    """Stands in for the group of the other backends, and records its calls."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self._asked.append(name)


def test_what_torch_does_around_a_backend_is_done_around_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is torch's wrapper that compares calls, and its flight recorder for backends without one of their own."""
    monkeypatch.setattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", {"shardnet"}, raising=False)
    level = dist.get_debug_level()
    try:
        for backend in (MIXED[0], MIXED[2]):
            dist.set_debug_level(dist.DebugLevel.DETAIL)
            with alone(backend) as group:
                others = group._get_backend(GPU if backend == MIXED[0] else CPU)
                assert isinstance(others, c10d._ProcessGroupWrapper)
                assert hasattr(distributed_c10d, "_maybe_attach_flight_recorder") == (group._recorder is not None)
                mine = torch.ones(2)
                dist.all_reduce(mine)
                assert mine.tolist() == [1.0, 1.0]
    finally:
        dist.set_debug_level(level)


@pytest.mark.parametrize(("backend", "bound"), [(MIXED[0], None), (MIXED[2], torch.device("cpu", 0))])
def test_a_device_that_is_bound(backend: str, bound: torch.device | None) -> None:
    """torch makes groups of a group by splitting the backend of that device, but shardnet's backend cannot be split."""
    with alone(backend, device_id=torch.device("cpu", 0)) as group:
        assert group.bound_device_id == bound
        mine = torch.ones(2)
        dist.all_reduce(mine, group=dist.new_group([0]))
        assert mine.tolist() == [1.0, 1.0]
