"""`refuse`: how ranks hear that another one will not take part in the second half of a reduction, because its first half has failed."""

import torch

from shardnet.backend import Backend


def refuse(backend: Backend, why: str) -> None:
    """Start a collective that does not match the other ranks' one, so that it fails on all ranks of `backend` and their numbering stays in
    step."""
    try:
        refusal = backend.all_reduce(torch.zeros(1, device="cpu"), label=why)
    except Exception:  # noqa: BLE001 - the backend is closed, and the others know
        return
    refusal.quietly()
