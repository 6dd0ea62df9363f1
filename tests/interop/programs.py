"""Programs with torch.distributed, as users write them; run by forked ranks in worlds of the backend "shardnet"."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, call-overload, no-untyped-call, arg-type, union-attr, no-any-return, assignment"

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardnet.credentials import Role, Security
from shardnet.interop.process_group import ShardnetProcessGroup
from shardnet.transport.observe import snapshot

TIMEOUT = timedelta(seconds=30)
Program = Callable[[int, int, Path], None]


def main(folder: str, world_size: str, name: str, *environment: str) -> int:
    """Run one of the programs below on so many ranks, in an environment with NAME=VALUE; returns how many failed."""
    os.environ |= dict(each.split("=", 1) for each in environment)
    return launch(globals()[name], folder, int(world_size))


def launch(program: Program, folder: str, world_size: int) -> int:
    """Run a program on `world_size` ranks; return how many failed, not counting ranks that were killed."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, world_size, folder, program)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode not in (0, -signal.SIGKILL) for process in ranks)


def _rank(rank: int, world_size: int, folder: str, program: Program) -> None:
    torch.set_num_threads(1)
    try:
        begin(rank, world_size, Path(folder))
        program(rank, world_size, Path(folder))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the rank ends at once, without what hangs behind it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def begin(rank: int, world_size: int, folder: Path, store: str = "store") -> None:
    backend = os.environ.get("BACKEND", "shardnet")
    dist.init_process_group(backend, init_method=f"file://{folder}/{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)


# --- collectives


def reductions(rank: int, world_size: int, _: Path) -> None:
    ranks = range(world_size)
    cases = [
        (dist.ReduceOp.SUM, torch.float32, lambda x: x.sum(0)),
        (dist.ReduceOp.AVG, torch.float64, lambda x: x.mean(0)),
        (dist.ReduceOp.AVG, torch.int64, lambda x: x.sum(0) // world_size),
        (dist.ReduceOp.AVG, torch.int8, lambda x: -(-x.sum(0, dtype=torch.int8) // world_size)),
        (dist.ReduceOp.MIN, torch.int64, lambda x: x.min(0).values),
        (dist.ReduceOp.MAX, torch.bfloat16, lambda x: x.max(0).values),
        (dist.ReduceOp.PRODUCT, torch.int32, lambda x: x.prod(0).to(torch.int32)),
        (dist.ReduceOp.SUM, torch.complex64, lambda x: x.sum(0)),
        (dist.ReduceOp.BAND, torch.int16, lambda x: _bitwise(torch.bitwise_and, x)),
        (dist.ReduceOp.BOR, torch.uint8, lambda x: _bitwise(torch.bitwise_or, x)),
        (dist.ReduceOp.BXOR, torch.int64, lambda x: _bitwise(torch.bitwise_xor, x)),
        (dist._make_nccl_premul_sum(0.5), torch.float32, lambda x: x.sum(0) / 2),
    ]
    for op, dtype, expected in cases:
        sign = -1 if dtype == torch.int8 else 1  # a mean is truncated towards zero
        whole = torch.stack([((torch.arange(world_size * 6) % 5 + each + 1) * sign).view(world_size * 2, 3).to(dtype) for each in ranks])
        want = expected(whole)
        mine = whole[rank].clone()
        dist.all_reduce(mine, op)
        assert torch.equal(mine, want), (op, dtype)
        strided = whole[rank].t().contiguous().t()
        assert not strided.is_contiguous()
        dist.all_reduce(strided, op)
        assert torch.equal(strided, want), (op, dtype, "strided")
        expanded = whole[rank][0, :1].clone().expand(2, 3)
        dist.all_reduce(expanded, op)
        assert torch.equal(expanded, want[0, :1].expand(2, 3)), (op, dtype, "expanded")
        part = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole[rank], op)
        assert torch.equal(part, want.view(world_size, 2, 3)[rank]), (op, dtype)
        dist.reduce_scatter(part.zero_(), list(whole[rank].clone().chunk(world_size)), op)
        assert torch.equal(part, want.view(world_size, 2, 3)[rank]), (op, dtype)
        at_root = whole[rank].clone()
        dist.reduce(at_root, dst=1, op=op)
        assert torch.equal(at_root, want if rank == 1 else whole[rank])


def _bitwise(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: torch.Tensor) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = op(total, part)
    return total


def movements(rank: int, world_size: int, _: Path) -> None:
    ranks = range(world_size)
    for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e5m2, torch.uint16):
        whole = [(torch.arange(6) + each).view(2, 3).to(torch.float32).to(dtype) for each in ranks]
        same = lambda got, want: bool((got.to(torch.complex128) == want.to(torch.complex128)).all())  # noqa: E731
        parts = [torch.empty_like(whole[0]) for _ in ranks]
        dist.all_gather(parts, whole[rank])
        assert all(map(same, parts, whole)), dtype
        flat = torch.empty(world_size * 2, 3, dtype=dtype)
        dist.all_gather_into_tensor(flat, whole[rank])
        assert same(flat, torch.cat([each.to(torch.complex128) for each in whole])), dtype
        mine = whole[rank].clone()
        dist.broadcast(mine, src=1)
        assert same(mine, whole[1]), dtype
        gathered = [torch.empty_like(mine) for _ in ranks] if rank == 1 else None
        dist.gather(whole[rank], gathered, dst=1)
        assert gathered is None or all(map(same, gathered, whole)), dtype
        mine = torch.empty_like(whole[0])
        dist.scatter(mine, [each.clone() for each in whole] if rank == 1 else None, src=1)
        assert same(mine, whole[rank]), dtype
        got = [torch.empty_like(whole[0]) for _ in ranks]
        dist.all_to_all(got, [whole[(rank + to) % world_size] for to in ranks])
        assert all(same(got[source], whole[(source + rank) % world_size]) for source in ranks), dtype
    one = torch.empty(1)
    dist.scatter(one.expand(2), [torch.full((2,), float(each)) for each in ranks] if rank == 0 else None, src=0)
    assert one.item() == rank
    uneven = [torch.empty(each + 1) for each in ranks]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [each.tolist() for each in uneven] == [[float(each)] * (each + 1) for each in ranks]
    out = torch.empty(sum(each + 1 for each in ranks), 2)
    dist.all_to_all_single(
        out, torch.full(((rank + 1) * world_size, 2), float(rank)), [each + 1 for each in ranks], [rank + 1] * world_size
    )
    assert out[:, 0].tolist() == [float(each) for each in ranks for _ in range(each + 1)]


def conveniences(rank: int, world_size: int, _: Path) -> None:
    """Objects, coalescing, sends with tags, receives from any source, groups, functional collectives."""
    told: list[object] = [None] * world_size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": each} for each in range(world_size)]
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, src=1)
    assert objects == ["from 1"]
    tensors = [torch.full((3,), float(rank)) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each)
    manager.wait()
    assert all(each.tolist() == [float(sum(range(world_size)))] * 3 for each in tensors)
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    got = [torch.empty(2), torch.empty(2)]
    works = dist.batch_isend_irecv(
        [
            *(dist.P2POp(dist.isend, torch.full((2,), rank + tag / 10), to, tag=tag) for tag in (1, 2)),
            *(dist.P2POp(dist.irecv, got[tag - 1], source, tag=tag) for tag in (2, 1)),
        ]
    )
    for work in works:
        work.wait()
    assert [round(float(each[0]), 1) for each in got] == [source + 0.1, source + 0.2]
    if rank == 1:
        whatever = torch.zeros(3, 2).t()
        sources = []
        for _ in range(2 * (world_size - 1)):
            sources.append(dist.recv(whatever, tag=3))
            assert whatever.tolist() == [[sources[-1]] * 3] * 2
        assert sorted(sources) == sorted([each for each in range(world_size) if each != 1] * 2)
    else:
        for _ in range(2):
            dist.send(torch.full((2, 3), float(rank)), 1, tag=3)
    last = dist.new_group([world_size - 2, world_size - 1])
    if rank == world_size - 1:
        received = dist.irecv(got[0], group=last)
        received.wait()
        assert received._source_rank() == 0  # of the group
    elif rank == world_size - 2:
        dist.send(got[0], world_size - 1, group=last)
    pair = dist.new_group([0, 1])
    if rank < 2:
        mine = torch.ones(4)
        dist.all_reduce(mine, group=pair)
        assert mine.tolist() == [2.0] * 4
        assert dist.get_rank(pair) == rank
    functional = torch.distributed._functional_collectives
    assert functional.all_reduce(torch.ones(3), "sum", list(range(world_size))).tolist() == [float(world_size)] * 3
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    assert work.get_future().then(lambda done: done.value()[0] + 1).wait().tolist() == [world_size + 1.0] * 2
    dist.barrier()


# --- trainings


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(model: nn.Module, batches: Callable[[int], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _alone(world_size: int) -> list[torch.Tensor]:
    model = _model()
    _train(model, lambda step: torch.cat([_batch(rank, step) for rank in range(world_size)]))
    return [parameter.detach() for parameter in model.parameters()]


def _far(found: list[torch.Tensor], world_size: int) -> float:
    return max(float((ours - alone).abs().max()) for ours, alone in zip(found, _alone(world_size), strict=True))


def ddp(rank: int, world_size: int, _: Path) -> None:
    model = nn.parallel.DistributedDataParallel(_model())
    _train(model, lambda step: _batch(rank, step))
    assert _far([each.detach() for each in model.parameters()], world_size) <= 1e-7


def ddp_in_rank_order(rank: int, world_size: int, _: Path) -> None:
    """If rank order is requested, gradients are those of a loop over the ranks, to the bit. Otherwise they are not, because the model is so
    large that a bucket goes in parts."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
    batches = [torch.randn(4, 1024, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
    looped = [torch.zeros_like(each) for each in model.parameters()]
    for batch in batches:
        model(batch).square().mean().backward()
        for total, parameter in zip(looped, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad / world_size
            parameter.grad = None
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100)
    parallel(batches[rank]).square().mean().backward()
    alike = [torch.equal(parameter.grad, total) for total, parameter in zip(looped, model.parameters(), strict=True)]
    assert all(alike) == (os.environ["SHARDNET_ROUTING"] == "rank-order"), alike


def fsdp2(rank: int, world_size: int, _: Path) -> None:
    _fully_sharded(rank, world_size, None)


def hsdp(rank: int, world_size: int, _: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    _fully_sharded(rank, world_size, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))


def _fully_sharded(rank: int, world_size: int, mesh: object) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, lambda step: _batch(rank, step))
    far = _far([each.full_tensor().detach() for each in model.parameters()], world_size)
    assert far <= 1e-7, far


def fsdp1(rank: int, world_size: int, _: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        assert _far([each.detach().clone() for each in model.parameters()], world_size) <= 1e-7


def zero(rank: int, world_size: int, _: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert _far([each.detach() for each in model.parameters()], world_size) <= 1e-7


def joined(rank: int, world_size: int, _: Path) -> None:
    """Some ranks run out of batches before the others. The mean is over all ranks, or over those that still have some."""
    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for initial in (True, False):
        with model.join(divide_by_initial_world_size=initial):
            for step in range(1 + 2 * rank):
                model(_batch(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    flat = torch.cat([each.detach().view(-1) for each in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(each, flat) for each in everyone)


def tensors_of_a_mesh(rank: int, world_size: int, folder: Path) -> None:
    """Tensor parallelism by DTensor, and torch's distributed checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world_size,))
    model, whole = _model(), _model()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = _batch(0, 0)
    torch.testing.assert_close(model(batch), whole(batch))
    dcp.save(model.state_dict(), checkpoint_id=str(folder / "checkpoint"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(folder / "checkpoint"))
    for found, wanted in zip(state.values(), whole.state_dict().values(), strict=True):
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, wanted)


def alike(rank: int, world_size: int, folder: Path) -> None:
    """Two runs of the same training, whose results are written to a file."""
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    _train(model, lambda step: _batch(rank, step))
    bits = torch.cat([each.detach().view(-1) for each in model.parameters()]).numpy().tobytes()
    (folder / f"bits of {rank}").write_bytes(bits)


# --- what goes wrong


def mismatch(rank: int, world_size: int, folder: Path) -> None:
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
    except Exception as error:  # noqa: BLE001 - which one is what is looked at
        _note(folder, rank, error)


def mismatched_means(rank: int, world_size: int, folder: Path) -> None:
    """Both kinds of mean are a sum on the way."""
    try:
        dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG if rank == 0 else dist.ReduceOp.SUM)
    except Exception as error:  # noqa: BLE001 - which one is what is looked at
        _note(folder, rank, error)


def mismatched_roots(rank: int, world_size: int, folder: Path) -> None:
    """The calls exchange equally many bytes between the same ranks."""
    last, alone = dist.new_group([0, 2]), torch.ones(2)
    parts = [torch.ones(2) for _ in range(world_size)]
    calls: list[tuple[Callable[[], object], Callable[[], object]]] = [  # by rank 0 and rank 2
        (lambda: dist.gather(alone, parts[:2], dst=0, group=last), lambda: dist.gather(alone, parts[:2], dst=2, group=last)),
        (
            lambda: dist.gather(alone, parts[:2], dst=0, group=last),
            lambda: dist.all_to_all_single(torch.empty(0), alone, [0, 0], [2, 0], group=last),
        ),
        (lambda: dist.scatter(alone, parts[:2], src=0, group=last), lambda: dist.scatter(alone, parts[:2], src=2, group=last)),
        (lambda: dist.reduce(alone, dst=2, group=last), lambda: last._backend.reduce_scatter(alone, sizes=[0, 2]).wait()),
    ]
    for number, call in enumerate(calls if rank != 1 else []):
        (folder / str(number)).mkdir(exist_ok=True)
        try:
            call[rank // 2]()
        except Exception as error:  # noqa: BLE001 - which one is what is looked at
            _note(folder / str(number), rank, error)
    if rank != 1:
        dist.gather(alone, parts[:2] if rank == 2 else None, dst=2, group=last)


def lost_in_backward(rank: int, world_size: int, folder: Path) -> None:
    """The last rank dies in a step; the others' backward says so, and they go on without it in a new world."""
    model = nn.parallel.DistributedDataParallel(_model())
    for step in range(2):  # DDP talks in the forward of the second
        model(_batch(rank, step)).square().mean().backward()
    loss = model(_batch(rank, 2)).square().mean()
    if rank == world_size - 1:
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except RuntimeError as error:
        _note(folder, rank, error)
    dist.destroy_process_group()
    begin(rank, world_size - 1, folder, "another store")
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [world_size - 1.0] * 2


def worlds_in_one_store(rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "kept"), -1)
    for number in itertools.count(1):
        dist.destroy_process_group()
        dist.init_process_group("shardnet", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        assert mine.item() == world_size
        if number == 3:
            break


def protected(rank: int, world_size: int, _: Path) -> None:
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [world_size] * 2
    group = dist.group.WORLD
    assert isinstance(group, ShardnetProcessGroup)
    operator = Security.find(Role.OPERATOR, token=os.environ["SHARDNET_TOKEN"])
    said = asyncio.run(snapshot(group.address, security=operator))
    assert said.rank == rank
    assert "TLS" in said.connections, said.connections


def _note(folder: Path, rank: int, error: Exception) -> None:
    (folder / f"error of {rank}").write_text(json.dumps({"type": type(error).__name__, "text": str(error), "at": time.time()}))
