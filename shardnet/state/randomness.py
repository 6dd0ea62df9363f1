"""The state of the random generators of this process."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, numpy and torch, on the CPU and every accelerator in use."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]  # torch has no annotation for it
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Let the generators go on from where `random_state` was taken."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([each.clone() for each in state["cuda"]])
