"""`IgnoredModules`: the part of a wrapped module that sharding leaves alone."""

from collections.abc import Iterable

from torch import nn

from shardnet.errors import UsageError


class IgnoredModules:
    """Submodules whose parameters and buffers stay as they are: whole, each rank's own, and never reduced here.

    As in torch's FSDP, an ignored module includes everything below it, and a parameter that is tied to one of an
    ignored module is ignored in every place. Unlike in torch's FSDP, buffers are not broadcast either: `ignored`
    means untouched.

    Raises UsageError for a module that is no submodule of `root`, for `root` itself, and for parameters without memory (on meta).
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module]) -> None:
        names = {module: name for name, module in root.named_modules()}
        heads = list(modules)
        for head in heads:
            _check(head, root, names)
        self.modules = frozenset(inner for head in heads for inner in head.modules())
        self.parameters = frozenset(parameter for head in heads for parameter in head.parameters())
        self.buffers = frozenset(buffer for head in heads for buffer in head.buffers())
        for head in heads:
            for name, tensor in (*head.named_parameters(), *head.named_buffers()):
                if tensor.is_meta:
                    raise UsageError(
                        f"{names[head]}.{name} is on meta, and FSDP does not initialise ignored modules: initialise this module before you "
                        "shard the model"
                    )

    def refuse_units(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        """Raise UsageError if one of `units` would be both ignored and sharded."""
        for name, module in units:
            if module in self.modules:
                raise UsageError(
                    f"{name} ({type(module).__name__}) is chosen by units and is also in ignored_modules; "
                    "leave it out of one of the two: units may be a predicate (name, module) -> bool"
                )


def _check(head: object, root: nn.Module, names: dict[nn.Module, str]) -> None:
    if not isinstance(head, nn.Module):
        raise UsageError(f"ignored_modules must hold modules, got {head!r}")
    if head is root:
        raise UsageError("ignored_modules contains the wrapped module itself, so nothing would be sharded; list submodules only")
    if head not in names:
        raise UsageError(f"ignored_modules contains a {type(head).__name__} that is not a submodule of the wrapped {type(root).__name__}")
