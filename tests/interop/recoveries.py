"""Programs with FSDP2 that go on after an error, as users write them; run by forked ranks."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, no-untyped-call, union-attr, operator"

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardnet.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, ShardnetError
from tests.interop import programs

Disturb = Callable[[nn.Sequential], None]
STEPS, DISTURBED = 4, 2


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


# --- a step is repeated


def stray_in_forward(rank: int, world_size: int, _: Path) -> None:
    """The last rank calls another collective between two layers of forward."""

    def disturb(model: nn.Sequential) -> None:
        if rank == world_size - 1:
            _once(model[2].register_forward_pre_hook, _call_something_else)

    _is_repeated(rank, disturb, CollectiveMismatch)


def stray_in_backward(rank: int, world_size: int, _: Path) -> None:
    """It does so before a layer's gradients are reduced, when those of later layers have been."""

    def disturb(model: nn.Sequential) -> None:
        if rank == world_size - 1:
            _once(model[2].register_full_backward_pre_hook, _call_something_else)

    _is_repeated(rank, disturb, CollectiveMismatch)


def late_in_forward(rank: int, world_size: int, _: Path) -> None:
    """The last rank reaches a layer after another rank has given up waiting for it."""
    store = dist.distributed_c10d._get_default_store()

    def disturb(model: nn.Sequential) -> None:
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        if rank == world_size - 1:
            _once(model[2].register_forward_pre_hook, lambda: store.wait(["given up"]))

    def failed() -> None:
        store.set("given up", "by one at least")
        dist.group.WORLD.set_timeout(programs.TIMEOUT)

    _is_repeated(rank, disturb, CollectiveTimeout, failed)


def alone_in_giving_up(rank: int, world_size: int, _: Path) -> None:
    """The first rank repeats a step that all others have completed: their next gathers look like its own."""

    def give_up() -> None:
        raise CollectiveTimeout("as it would be if the last sum had come a moment later", [world_size - 1])

    def disturb(model: nn.Sequential) -> None:
        if rank == 0:
            at_the_end = torch.autograd.Variable._execution_engine.queue_callback
            _once(model[2].register_full_backward_pre_hook, lambda: at_the_end(give_up))

    undisturbed, _none = _train_repeating(rank, lambda _: None, lambda: None)
    bits, errors = _train_repeating(rank, disturb, lambda: None)
    assert [type(error) for error in errors] == [*([CollectiveTimeout] if rank == 0 else []), CollectiveMismatch], errors
    assert bits == undisturbed


def _call_something_else() -> None:
    dist.all_reduce(torch.ones(3))


def _once(register: Callable[[Callable[..., None]], Any], action: Callable[[], None]) -> None:
    """Do something in a hook, only the first time that the hook is called."""

    def hook(*_: object) -> None:
        handle.remove()
        action()

    handle = register(hook)


def _is_repeated(rank: int, disturb: Disturb, kind: type[ShardnetError], failed: Callable[[], None] = lambda: None) -> None:
    """Every rank gets one error of that kind, in the disturbed step, and ends with the bits of an undisturbed run."""
    undisturbed, none = _train_repeating(rank, lambda _: None, failed)
    bits, errors = _train_repeating(rank, disturb, failed)
    assert none == []
    assert [type(error) for error in errors] == [kind], errors
    assert bits == undisturbed


def _train_repeating(rank: int, disturb: Disturb, failed: Callable[[], None]) -> tuple[bytes, list[ShardnetError]]:
    """The bits of all parameters after the last step, and the errors for which steps were repeated."""
    model, errors = _sharded(), list[ShardnetError]()
    optimizer = _optimizer(model)
    for step in range(STEPS):
        if step == DISTURBED:
            disturb(model)
        while True:
            computed = False
            try:
                model(programs._batch(rank, step)).square().mean().backward()
                computed = True
                dist.barrier()  # a rank that is in another attempt does not call this
                break
            except (CollectiveMismatch, CollectiveTimeout) as error:
                if computed and isinstance(error, CollectiveTimeout):
                    raise  # others may have gone on
                errors.append(error)
                assert len(errors) < 3, errors
                failed()
                model.reset_iter_state()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(each.full_tensor().detach().numpy().tobytes() for each in model.parameters()), errors


# --- a rank is lost


def goes_on_without_one(rank: int, world_size: int, folder: Path) -> None:
    """The last rank dies in a step. The others keep the whole state of the last step, and make a new world and a new model."""
    whole = states.StateDictOptions(full_state_dict=True)
    model = _sharded()
    optimizer = _optimizer(model)
    kept: tuple[Any, Any] = {}, {}
    lost = -1, -1
    try:
        for step in range(STEPS):
            if step == DISTURBED and rank == world_size - 1:
                _once(model[2].register_full_backward_pre_hook, lambda: os.kill(os.getpid(), signal.SIGKILL))
            _step(model, optimizer, programs._batch(rank, step))
            kept = states.get_state_dict(model, optimizer, options=whole)
    except PeerLost as error:
        lost = step, error.rank
    assert lost == (DISTURBED, world_size - 1)
    dist.destroy_process_group()
    programs.begin(rank, world_size - 1, folder, "another store")
    model = _sharded()
    optimizer = _optimizer(model)
    states.set_state_dict(model, optimizer, model_state_dict=kept[0], optim_state_dict=kept[1], options=whole)
    for step in range(DISTURBED, STEPS):
        _step(model, optimizer, programs._batch(rank, step))
    alone = _model()
    optimizer = _optimizer(alone)
    for step in range(STEPS):
        ranks = range(world_size if step < DISTURBED else world_size - 1)
        _step(alone, optimizer, torch.cat([programs._batch(each, step) for each in ranks]))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=0, atol=1e-7)


# --- trainings


def _model() -> nn.Sequential:
    """Equal layers, so that a gather of one could be mistaken for that of another."""
    torch.manual_seed(7)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.GELU())))


def _sharded() -> nn.Sequential:
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
