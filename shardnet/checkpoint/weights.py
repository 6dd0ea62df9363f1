"""A model's parameters and buffers as safetensors files, in the module's own names: for plain PyTorch, Hugging Face and others."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardnet.errors import CheckpointError, UsageError

Tensor = torch.Tensor
_FILE = "model.safetensors"  # as Hugging Face names the only one of a folder
_INDEX = "model.safetensors.index.json"  # and the file that says which tensor is in which of several


def write_weights(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what `model.full_state_dict(rank0_only=True)` returns on rank 0 into one file, which appears whole or not at all. It loads
    with `module.load_state_dict(safetensors.torch.load_file(path))`. Values that are no tensors are left out. A file that is there is
    replaced; if the path is a symbolic link, the file that it points to. Raises OSError, and UsageError if what is there is no file, but
    a folder or device."""
    final = Path(path)
    if final.exists() and not final.is_file():
        raise UsageError(
            f"{final} is not a regular file, so no weights are written to it; give the path of a new file, or of a file to replace"
        )
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value.clone() if value.data_ptr() in seen else value.contiguous()  # the format cannot share memory
            seen.add(value.data_ptr())
    final = final.resolve()
    unfinished = final.with_name(f".unfinished-{final.name}")
    try:
        unfinished.touch()
        try:
            mode = unfinished.stat().st_mode  # as the umask has it: safetensors makes a file that only its owner may read
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.chmod(mode)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(final)
        finally:
            unfinished.unlink(missing_ok=True)
    except SafetensorError as error:
        raise OSError(f"{final}: {error}") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(final)) from error  # the caller knows nothing of the unfinished file


def read_weights(path: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file by name, one at a time: `model.load_full_state_dict(read_weights(path))` holds no whole tensor for longer
    than it needs it. Raises CheckpointError for a file that is not a safetensors file."""
    with _opened(Path(path)) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            yield name, file.get_tensor(name)


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The tensors of such a file by name, or of a folder that `save_pretrained` has written, in one file or several. Each tensor is read
    whenever it is asked for, every time again, so nobody holds them all: for `initial_state` of a model on meta, and for
    `load_full_state_dict`.

    Raises CheckpointError, here or when a tensor is asked for, for what cannot be read.
    """
    given = Path(path)
    index = given / _INDEX
    if index.is_file():
        try:
            files = json.loads(index.read_text())["weight_map"]
            return _Weights({name: given / file for name, file in files.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    only = given / _FILE if given.is_dir() else given
    with _opened(only) as file:
        return _Weights(dict.fromkeys(file.keys(), only))
    raise AssertionError("unreachable: an error is passed on as another one")


class _Weights(Mapping[str, Tensor]):
    """Where each tensor is."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
