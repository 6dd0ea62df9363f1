"""`refuse`: how ranks hear that another one will not take part in the second half of a reduction, as its first half has failed."""

import torch

from shardnet.backend import Backend


def refuse(backend: Backend, why: str) -> None:
    """Take part in what nobody else takes it for, so that it fails for all ranks of `backend` and its numbers stay in step."""
    try:
        refusal = backend.all_reduce(torch.zeros(1, device="cpu"), label=why)
    except Exception:  # noqa: BLE001 - the backend is closed, and the others know
        return
    refusal.quietly()
