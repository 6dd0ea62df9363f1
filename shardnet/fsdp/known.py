"""`KnownParameters`: checks that a sharded model has got no parameters since it was sharded."""

from collections.abc import Iterable

from torch import nn

from shardnet.errors import StateError
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.ignored import IgnoredModules


class KnownParameters:
    """The parameters of one model. Nobody would reduce the gradients of parameters added later, such as a new head or adapters: ranks would
    train them apart."""

    def __init__(self, module: nn.Module, groups: Iterable[FlatGroup], ignored: IgnoredModules) -> None:
        self._module = module
        self._ignored = ignored  # the owner of these modules may change them freely
        # The groups live as long as the model, and their parameters with them, so that no other one gets such an id.
        self._ids = {id(parameter) for group in groups for parameter in (*group.originals, *group.leaves)}
        self._ids |= {id(parameter) for parameter in ignored.parameters}

    def check(self) -> None:
        """Raise StateError for a parameter that came later. It runs in each step, so it does not look up names: half a microsecond a
        module."""
        seen = set[nn.Module](self._ignored.modules)
        waiting = [self._module]
        while waiting:
            part = waiting.pop()
            if part in seen:
                continue
            seen.add(part)
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) not in self._ids:
                    raise self._unknown(parameter)
            waiting += [child for child in part._modules.values() if child is not None]

    def _unknown(self, parameter: nn.Parameter) -> StateError:
        name = next(name for name, other in self._module.named_parameters() if other is parameter)
        return StateError(
            f"{name} was added to the model after the model was sharded, so each rank would train it by itself: change the module "
            "before you shard it, or call unwrap(), change the module and shard it again (torch.func.functional_call, which "
            "replaces parameters during a call, does not work with a sharded model)"
        )
