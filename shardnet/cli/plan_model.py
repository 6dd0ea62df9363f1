"""The model that `shardnet plan` is asked about: built from a class or function that a user names, or from sizes."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardnet.cli.arguments import Arguments
from shardnet.errors import UsageError
from shardnet.planning import ModelSize, activation_bytes

SIZES = ("parameters", "root_parameters", "layers", "hidden", "vocabulary")
MODEL_ONLY = ("units", "input")


def model_of(options: Arguments) -> ModelSize:
    """The model that the command line describes. Raises UsageError saying what is missing, contradictory or cannot be built."""
    given = [f"--{name.replace('_', '-')}" for name in SIZES if getattr(options, name) is not None]
    if options.model is not None:
        if given:
            raise UsageError(f"{options.model} has sizes of its own; leave out {', '.join(given)}")
        return _built(options)
    for name in MODEL_ONLY:
        if getattr(options, name):
            raise UsageError(f"--{name} is for a model given as MODULE:CALLABLE")
    dtype = dtype_of(options.dtype) or torch.float32
    match (options.parameters, options.hidden, options.layers):
        case (int(parameters), None, int(layers)) if options.vocabulary is None:
            return ModelSize.of_sizes(parameters, layers, root=options.root_parameters or 0, dtype=dtype)
        case (None, int(hidden), int(layers)) if options.vocabulary is not None and options.root_parameters is None:
            return ModelSize.of_transformer(hidden, layers, options.vocabulary, dtype=dtype)
    raise UsageError(
        "name a model as MODULE:CALLABLE, or give its sizes: --parameters and --layers, or --hidden, --layers and --vocabulary"
        + (f"; got only {', '.join(given)}" if given else "")
    )


def dtype_of(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


def _built(options: Arguments) -> ModelSize:
    module = _on_meta(options.model, _callable(options.model))
    if (dtype := dtype_of(options.dtype)) is not None:
        module = module.to(dtype)
    size = ModelSize.of_module(options.model, module, _units(options.units, module))
    if not options.input:
        return size
    inputs = [_input(text, dtype_of(options.compute_dtype)) for text in options.input]
    if (compute := dtype_of(options.compute_dtype)) is not None:
        module = module.to(compute)
    return ModelSize(size.name, size.units, activation_bytes(module, inputs))


def _callable(path: str) -> Callable[[], Any]:
    """Import `package.module:name`, from the current directory or from installed packages."""
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise UsageError(f"{path!r} does not say what to call: write MODULE:CALLABLE, such as my_project.model:small")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"importing {module_name} failed: {error}") from error
        raise UsageError(f"there is no module {module_name!r}, neither in {here} nor installed") from error
    except Exception as error:
        raise UsageError(f"importing {module_name} failed: {_said(error)}") from error
    result: Callable[[], Any] | None = getattr(found, attribute, None)
    if result is None or not callable(result):
        wrong = f"is {type(result).__name__}, which cannot be called" if hasattr(found, attribute) else "is not in it"
        raise UsageError(f"{module_name} was imported, but {attribute!r} {wrong}")
    return result


def _on_meta(path: str, make: Callable[[], Any]) -> nn.Module:
    """Build the module on the meta device, without memory."""
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:
        raise UsageError(f"{path}() failed, called without arguments on the meta device: {_said(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{path}() returned {type(module).__name__}, not a torch.nn.Module")
    return module.to("meta")


def _units(names: str | None, module: nn.Module) -> Sequence[type[nn.Module]] | None:
    if names is None:
        return None
    classes = {type(each) for each in module.modules()}
    known = {each.__name__ for each in classes}
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise UsageError(f"--units: the model has no {' or '.join(unknown)}; its modules are {', '.join(sorted(known))}")
    return [each for each in classes if each.__name__ in wanted]


def _input(text: str, compute: torch.dtype | None) -> torch.Tensor:
    """`4x1024:int64` as a tensor on the meta device; floats are cast as training would."""
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = shape.split("x")
    if not isinstance(dtype, torch.dtype) or not all(size.isascii() and size.isdecimal() for size in sizes):
        raise UsageError(f"--input must be a shape and dtype such as 4x1024:int64, got {text!r}")
    if compute is not None and dtype.is_floating_point:
        dtype = compute
    return torch.empty([int(size) for size in sizes], dtype=dtype, device="meta")


def _said(error: Exception) -> str:
    """One line: the error's class and its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
