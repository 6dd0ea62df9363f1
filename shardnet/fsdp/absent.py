"""`AbsentParameter`: what a module holds in a parameter's place while the model's forward runs, but its unit does not.

[Note: absent parameters] A model may read a parameter outside of the forward of its unit: `F.linear(x, self.embedding.weight)`. It
would find this rank's slice, and with luck an error of torch's about shapes; a slice of one element fits everywhere. So for the time of a
forward there is something that has the shape, dtype and device of the whole parameter, which may be asked for, and no content.
"""

from typing import Any

import torch

from shardnet.errors import StateError
from shardnet.fsdp.tensors import tensors_in

Tensor = torch.Tensor


class AbsentParameter(Tensor):
    """Stands for one parameter; lives as long as its group. Whatever is computed with it raises StateError, saying what to do."""

    _is_param = True  # for isinstance(…, nn.Parameter)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # only what computes is refused
    _name: str
    _unit: str

    @staticmethod
    def of(leaf: Tensor, name: str, unit: str) -> "AbsentParameter":
        """Like `leaf`, the whole parameter."""
        absent: AbsentParameter = Tensor._make_wrapper_subclass(
            AbsentParameter, leaf.size(), dtype=leaf.dtype, device=leaf.device, requires_grad=False
        )
        absent._name, absent._unit = name, unit
        return absent

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._name}, sharded, {self.dtype} {tuple(self.shape)}>"

    def refusal(self) -> StateError:
        return StateError(
            f"{self._name} is sharded here: it is whole only while its unit {self._unit} runs. Call that module rather than read its "
            "parameters, or leave it out of `units`, so that the unit around it gathers them"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise next(each for each in tensors_in((args, kwargs)) if isinstance(each, AbsentParameter)).refusal()
