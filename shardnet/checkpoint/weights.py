"""A model's parameters and buffers as one safetensors file, in the module's own names: for plain PyTorch, Hugging Face and others."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardnet.errors import CheckpointError

Tensor = torch.Tensor


def write_weights(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what `model.full_state_dict(rank0_only=True)` gives to rank 0 into one file, which is there whole or not at all. It loads with
    `module.load_state_dict(safetensors.torch.load_file(path))`. What is no tensor is left out. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value.clone() if value.data_ptr() in seen else value.contiguous()  # the format has no memory under two names
            seen.add(value.data_ptr())
    final = Path(path)
    unfinished = final.with_name(f".unfinished-{final.name}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode  # as the umask has it: safetensors makes a file that its owner alone may read
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.chmod(mode)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.rename(final)
    except SafetensorError as error:
        raise OSError(f"{final}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_weights(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file by name, one at a time: `model.load_full_state_dict(read_weights(path))` has none of them whole for longer
    than it needs it. Raises CheckpointError for what is no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error
