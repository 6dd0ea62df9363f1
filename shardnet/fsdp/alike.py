"""Whether all ranks shard the same model in the same way.

What is gathered, reduced and spread at first goes through groups of its own ([Note: streams] in communicators.py). Ranks that disagree may
so come to wait for each other in different groups, which nobody notices until the time is up. So before anything is sent they
compare all that decides what is sent, in a barrier that only those can pass together whose label is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import zip_longest

import numpy as np
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.collectives.reduction import dtype_name
from shardnet.errors import CollectiveMismatch
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.ignored import IgnoredModules
from shardnet.fsdp.placement import UnitPlan
from shardnet.fsdp.precision import MixedPrecision

_LABEL = "whether all ranks shard the same model"
_FACT_BYTES = 240  # of a fact that ranks disagree on, as much as an error shows
_NONE = "nothing more"

Tensor = torch.Tensor


def facts(
    plans: Sequence[UnitPlan],
    module: nn.Module,
    ignored: IgnoredModules,
    precision: MixedPrecision,
    compression: Compression,
    options: Sequence[str],
) -> Iterator[str]:
    """All that the ranks must agree on, a line each: `options`, then each unit with its parameters, then buffers."""
    yield from options
    yield str(compression)
    for plan in plans:
        yield f"unit {plan.name}"
        for placed in plan.parameters:
            dtypes, parameter = precision.dtypes(placed.name, placed.parameter), placed.parameter
            kind = f"{dtypes}, reduced as {dtype_name(dtypes.reduce)}" if parameter.requires_grad else f"{dtypes}, frozen"
            yield f"{', '.join(placed.names)} {list(parameter.shape)} in {kind}"
    for name, buffer in module.named_buffers():
        if buffer not in ignored.buffers:
            yield f"buffer {name} {list(buffer.shape)} in {dtype_name(buffer.dtype)}"


def check_alike(known: Iterable[str], everyone: Backend) -> None:
    """Compare these facts with those of all other ranks. A collective. Raises CollectiveMismatch on all of them, with the first fact in
    which one differs from rank 0."""
    if everyone.world_size == 1:
        return
    text = "\n".join(known)
    try:
        everyone.barrier(label=f"{_LABEL} ({blake2b(text.encode(), digest_size=8).hexdigest()})").wait()
    except CollectiveMismatch:
        raise _difference(text, everyone) from None


def _difference(text: str, everyone: Backend) -> CollectiveMismatch:
    """The error for the first fact in which a rank differs from rank 0, of the lowest one that does. A collective."""
    pairs = zip_longest(_from_root(text, everyone).split("\n"), text.split("\n"), fillvalue=_NONE)
    differing = next(((theirs, ours) for theirs, ours in pairs if theirs != ours), ("", ""))
    told = everyone.all_gather(torch.cat([_fixed(fact) for fact in differing]), label=_LABEL).wait()
    found = [[_text(fact) for fact in pair] for pair in told.view(everyone.world_size, 2, _FACT_BYTES)]
    rank, (theirs, ours) = next((rank, pair) for rank, pair in enumerate(found) if any(pair))
    return CollectiveMismatch(
        f"rank 0 has {theirs!r} where rank {rank} has {ours!r}; all ranks must shard the same model with the same arguments"
    )


def _from_root(text: str, everyone: Backend) -> str:
    """Rank 0's text."""
    data = _bytes(text.encode())
    size = everyone.broadcast(torch.tensor([len(data)]), 0, label=_LABEL).wait()
    return _text(everyone.broadcast(data if everyone.rank == 0 else data.new_empty(int(size)), 0, label=_LABEL).wait())


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _fixed(fact: str) -> Tensor:
    return _bytes(fact.encode()[:_FACT_BYTES].ljust(_FACT_BYTES, b"\0"))


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
