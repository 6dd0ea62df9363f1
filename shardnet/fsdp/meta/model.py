"""`MetaModel`: a module that was built on the meta device gets its memory unit by unit, and no rank ever holds all of it.

[Note: order of initialisation] Modules are initialised in the order of `nn.Module.apply`: a module's children, as they
were registered, and then the module itself. A unit gets memory when this walk enters its module; when the walk leaves the
module, the unit is broadcast, cut and freed. So only the units around one module are whole at once, commonly the root and
one more, as in forward. The random numbers are those that `module.apply(param_init_fn)` draws on the whole module. They
are also those of building the module with memory if each module draws in its constructor what it draws in
`reset_parameters()`, and in the order of the walk, as torch's layers do.

[Note: tied on meta] A tied parameter is initialised once for each of its places, and the first initialisation counts, just
as when a head is built with a weight of its own that is then replaced by the embedding's. So a copy of the parameter exists
while a later place is initialised.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import nn

from shardnet.errors import UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.ignored import IgnoredModules
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.meta.initial_values import InitialValues, listed
from shardnet.fsdp.meta.whole_unit import WholeUnit
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.unit import Unit

Tensor = torch.Tensor


def is_on_meta(module: nn.Module, ignored: IgnoredModules) -> bool:
    """Whether a module was built on meta. Raises UsageError if only some of its parameters were; buffers may have memory."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter not in ignored.parameters}
    on_meta = [name for name, tensor in (*parameters.items(), *module.named_buffers()) if tensor.is_meta]
    whole = [name for name, parameter in parameters.items() if not parameter.is_meta]
    if on_meta and whole:
        raise UsageError(
            f"{on_meta[0]} is on meta but {whole[0]} is not: build the whole module under torch.device('meta') or none of it, "
            "or list the part that is already initialised in ignored_modules"
        )
    return bool(on_meta)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """What was put in the place of a buffer on meta."""

    name: str
    module: nn.Module
    key: str
    made: Tensor
    version: int  # before anybody could write to it

    @property
    def unfilled(self) -> bool:
        """See [Note: unfilled]; zeros that were written to are filled."""
        current = self.module._buffers.get(self.key)
        if current is not self.made:
            return current is not None and current.is_meta
        if _has_nan(current):
            return bool(current.isnan().any())
        return current._version == self.version and not current.any()


class MetaModel:
    """A module on its way from meta to shards; thrown away at the end of it.

    Its parameters stay the same objects. They have a device at once, but no memory until `materialise`; an error on the
    way leaves the module unusable.
    """

    def __init__(self, module: nn.Module, ignored: IgnoredModules, values: InitialValues, device: torch.device) -> None:
        self._module = module
        self._ignored = ignored
        self._values = values
        self._device = device
        values.check_modules((name, inner) for name, inner in module.named_modules() if inner not in ignored.modules)
        # On meta and in full shape: modules hold these once their unit is sharded, so that writing to one has no effect but is noticed.
        self._shades = {parameter: _leave_meta(parameter, device) for parameter in module.parameters() if parameter.is_meta}
        self._seen = set(ignored.modules)
        self._filled: set[nn.Parameter] = set()
        self._buffers: dict[Tensor, _Buffer] = {}  # by the buffer on meta, since one may have several places

    def materialise(self, units: Sequence[Unit], comms: Communicators, meter: MemoryMeter, pool: BufferPool) -> None:
        """Fill and shard every unit, and fill this rank's buffers. A collective. See [Note: order of initialisation].

        Raises UsageError that names a tensor which nobody filled or which stayed on meta. A state that does not fit raises on
        all ranks: rank 0 raises its own error (SizeMismatchError for a tensor that has another shape), the other ranks a
        UsageError.
        """
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        states = self._module.state_dict().keys()
        self._values.check_state(
            [placed for unit in units for group in unit.groups for placed in group.placed],
            buffers=[name for name in states if name in buffers and buffers[name] not in self._ignored.buffers],
            known=[name for name in states if not name.endswith("_extra_state")],
            comms=comms,
        )
        by_module = {unit.module: unit for unit in units}
        with torch.no_grad():
            self._visit("", self._module, lambda module: WholeUnit(by_module[module], comms, meter, pool) if module in by_module else None)
            with self._values.agreed("the buffers", comms):
                self._complete_buffers()
        for unit in units:
            for group in unit.groups:
                group.show_shard()

    def _visit(self, name: str, module: nn.Module, enter: Callable[[nn.Module], WholeUnit | None]) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        whole = enter(module)
        for key, child in module.named_children():
            self._visit(f"{name}.{key}" if name else key, child, enter)
        self._make_buffers(name, module)
        if self._values.calls(module):
            self._initialise(name, module)
        if whole is not None:
            whole.shard(self._values, self._shades)

    def _initialise(self, name: str, module: nn.Module) -> None:
        own = [parameter for parameter in module._parameters.values() if parameter in self._shades]
        kept = {parameter: parameter.clone() for parameter in own if parameter in self._filled}  # see [Note: tied on meta]
        versions = [shade._version for shade in self._shades.values()]
        self._values.call(module)
        if versions != [shade._version for shade in self._shades.values()]:
            raise UsageError(
                f"the initialisation of {name or type(module).__name__} wrote to parameters of another unit, which is sharded by then; "
                "each module must initialise only its own tensors, or those of modules in the same unit"
            )
        for parameter, first in kept.items():
            parameter.copy_(first)
        self._filled.update(own)

    def _make_buffers(self, name: str, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if buffer not in self._buffers:
                made = torch.full_like(buffer, nan if _has_nan(buffer) else 0, device=self._device)
                self._buffers[buffer] = _Buffer(f"{name}.{key}" if name else key, module, key, made, made._version)
            module._buffers[key] = self._buffers[buffer].made

    def _complete_buffers(self) -> None:
        for name, buffer in self._module.named_buffers(remove_duplicate=False):
            if buffer not in self._ignored.buffers:
                self._values.load_buffer(name, buffer)
        unfilled = [buffer.name for buffer in self._buffers.values() if buffer.unfilled]
        if unfilled and self._values.filled_here:
            raise UsageError(f"{listed(unfilled)}: buffers on meta that nothing has filled; {self._values.advice}")
        if left := [name for name, tensor in _attributes(self._module) if tensor.is_meta]:
            raise UsageError(
                f"{listed(left)}: a tensor in a plain attribute, which initialisation does not reach, so it is still on meta; register it "
                "as a buffer, perhaps with persistent=False"
            )


def _leave_meta(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Give a parameter a device and no memory, and return a new one that is what this one was."""
    nowhere = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    shade = nn.Parameter(nowhere, requires_grad=parameter.requires_grad)
    # as torch.utils.swap_tensors does, which refuses where there are weak references, such as nn.LSTM's
    torch._C._swap_tensor_impl(parameter, shade)
    return shade


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold neither as parameters nor as buffers."""
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, Tensor):
                yield f"{path}.{key}" if path else key, value


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
