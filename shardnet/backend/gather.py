"""`gather_json`: every rank's value, on every rank or on one."""

import json
from typing import Any

import torch

from shardnet.backend.base import Backend
from shardnet.errors import ProtocolError


async def gather_json(backend: Backend, value: object, label: str, *, to: int | None = None, timeout_s: float | None = None) -> list[Any]:
    """The values of all ranks in rank order. A collective: every rank calls it, with the same label.

    A value is what JSON can hold: None, bool, numbers, str, lists, and dicts with str keys. Tuples arrive as lists.
    Raises ProtocolError if a rank sent something else. `to` is the only rank that gets them, if they are large: the others get an empty
    list, and no such error. `timeout_s` is how long ranks wait for the last rank; None: as for any collective.
    """
    encoded = json.dumps(value, separators=(",", ":")).encode()
    sizes = (await backend.all_gather(torch.tensor([len(encoded)], device="cpu"), timeout_s=timeout_s, label=f"{label} sizes")).tolist()
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    if to is None:
        everything = await backend.all_gather(mine, sizes=sizes, label=label)
    else:
        sends = [len(encoded) if rank == to else 0 for rank in range(backend.world_size)]
        sizes = sizes if backend.rank == to else [0] * backend.world_size
        everything = await backend.all_to_all(mine, send_sizes=sends, recv_sizes=sizes, label=label)
        if backend.rank != to:
            return []
    return [_decode(part, rank, label) for rank, part in enumerate(torch.split(everything, sizes))]


def _decode(part: torch.Tensor, rank: int, label: str) -> Any:
    try:
        return json.loads(part.numpy().tobytes())
    except ValueError as error:
        raise ProtocolError(f"rank {rank} sent data for {label} that is not valid JSON: {error}") from error
