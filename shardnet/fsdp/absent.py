"""`AbsentParameter`: what a model gets when it reads a parameter outside the forward of that parameter's unit.

[Note: absent parameters] A model may read a parameter where the parameter's unit does not run: `F.linear(x, self.embedding.weight)`.
It would get this rank's slice, and with luck torch would raise an error about shapes; but a slice of one element fits everywhere, and
`w @ w.T` accepts any slice. So code that reads the attribute in a forward, or in a backward, which may recompute the forward, gets an
object that has the shape, dtype and device of the whole parameter and no content. What the module holds does not change, only what
reading its attributes gives: `parameters()`, optimizers, and a checkpoint that another thread writes meanwhile find the originals.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardnet.errors import StateError
from shardnet.fsdp.group import FlatGroup, sharded_by
from shardnet.fsdp.tensors import map_tensors, tensors_in

Tensor = torch.Tensor
_aten = torch.ops.aten
_ASKS_WHAT_IT_IS_LIKE = frozenset(
    (
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like),
        *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
    )
)


class AbsentParameter(Tensor):
    """Stands for one parameter; lives as long as the modules. Computing anything with it raises a StateError that says what to do.

    Attributes set on it are set on the original.
    """

    _is_param = True  # for isinstance(…, nn.Parameter)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # only what computes is refused
    original: nn.Parameter  # this rank's slice
    _name: str
    _unit: str

    @staticmethod
    def of(original: nn.Parameter, whole: Tensor, name: str, unit: str) -> "AbsentParameter":
        """Stands for `original`, and is like `whole`."""
        absent: AbsentParameter = Tensor._make_wrapper_subclass(AbsentParameter, whole.size(), dtype=whole.dtype, device=whole.device)
        vars(absent).update(original=original, _name=name, _unit=unit)
        return absent

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._name}, sharded, {self.dtype} {tuple(self.shape)}>"

    def refusal(self) -> StateError:
        return StateError(
            f"{self._name} is sharded: the parameter is whole only while its unit {self._unit} runs. Call the unit's module instead of "
            "reading its parameters, or leave that module out of `units`, so that the enclosing unit gathers them; parameters() has this "
            "rank's slices"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func.overloadpacket in _ASKS_WHAT_IT_IS_LIKE:
            return func(*map_tensors(_without_memory, args), **kwargs)
        made_of_others = func.decompose(*args, **kwargs)  # in inference mode composite operations, such as type_as, arrive whole
        if made_of_others is not NotImplemented:
            return made_of_others
        raise next(each for each in tensors_in((args, kwargs)) if isinstance(each, AbsentParameter)).refusal()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)  # such as what a program has set on it

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "_backward_hooks", "_post_accumulate_grad_hooks"):
            raise self.refusal()
        setattr(self.original, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal()

    def detach(self) -> "AbsentParameter":
        return self

    @property
    def data(self) -> "AbsentParameter":  # type: ignore[override]
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self.original.grad

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.original.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> "AbsentParameter":
        self.original.requires_grad_(requires_grad)
        return self


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters`: reading an attribute may give an AbsentParameter, iterating gives what the module holds."""

    def __init__(self, held: Mapping[str, nn.Parameter | None], computes_here: Callable[[], bool], *, of_slices: bool) -> None:
        """`of_slices`: whether the module, or one within it, has sharded parameters."""
        super().__init__(held)
        self._computes_here = computes_here
        self._of_slices = of_slices
        self._absent: dict[str, AbsentParameter] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(dict(self), memo)  # a copy of the module has slices and no runtime

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle reads a module's parameters first, before the hooks, of which torch could only say that they are local functions."""
        if self._of_slices:
            raise StateError(
                "a module of a sharded model cannot be pickled, since its parameters are this rank's slices: save the full_state_dict() of "
                "the FSDP model, or the module that unwrap() returns"
            )
        return dict, (dict(self),)

    def watch(self, name: str, absent: AbsentParameter) -> None:
        """Show `absent` in place of its original."""
        self._absent[name] = absent

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)
        absent = self._absent.get(name)
        return absent if absent is not None and held is absent.original and self._computes_here() else held

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value.original if isinstance(value, AbsentParameter) else value)


def watch_parameters(module: nn.Module, groups: Iterable[FlatGroup], computes_here: Callable[[], bool]) -> None:
    """From now on reading an attribute that holds a slice gives an AbsentParameter, if `computes_here()`."""
    for part in module.modules():  # also those without parameters: a program may add some
        of_slices = any(sharded_by(parameter) is not None for parameter in part.parameters())
        vars(part)["_parameters"] = WatchedParameters(part._parameters, computes_here, of_slices=of_slices)
    for group in groups:
        for entry, leaf in zip(group.placed, group.leaves, strict=True):
            absent = AbsentParameter.of(entry.parameter, leaf, entry.name, group.label)
            for slot in entry.slots:
                held = slot.module._parameters
                assert isinstance(held, WatchedParameters)
                held.watch(slot.attribute, absent)


def unwatch_parameters(module: nn.Module) -> None:
    """Undo `watch_parameters`."""
    for part in module.modules():
        vars(part)["_parameters"] = dict(part._parameters)
