"""Averaging gradients over ranks, bucket by bucket, so that each rank gets those of its own pieces."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from shardnet.backend import Pending
from shardnet.errors import StateError
from shardnet.fsdp.communicators import Communicators
from shardnet.zero.bucket import Bucket, Owned

Tensor = torch.Tensor
MAX_IN_FLIGHT = 2  # packed buckets: one is packed while the other one is on its way


class ReducedGradients:
    """The averaged gradients of one step; they lie in the pieces' `grad` and are dropped after the step."""

    def __init__(self, stepped: Sequence[Owned], parameters: Iterable[Tensor]) -> None:
        self.stepped = tuple(stepped)  # the buckets in which any parameter has a gradient
        self._sources = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]

    def check_current(self) -> None:
        """Raise StateError if a gradient was changed after it was reduced: the change would be lost."""
        for parameter, gradient, version in self._sources:
            if parameter.grad is not gradient or _version(gradient) != version:
                raise StateError(
                    "gradients changed between clip_grad_norm_() and step(): clip after the last backward, "
                    "and clear them with the optimizer's zero_grad()"
                )


def average(buckets: Iterable[Bucket], active: Mapping[Tensor, bool], pieces: Mapping[Tensor, nn.Parameter], comms: Communicators) -> None:
    """Set the pieces' gradients to the mean over ranks; None where `active` says that nobody has any. A collective.

    On an error no piece has a gradient, and nothing is under way any more.
    """
    in_flight: deque[tuple[Bucket, Tensor, Pending[Tensor]]] = deque()
    try:
        for bucket in buckets:
            in_flight.append((bucket, *bucket.start_reduction()))
            if len(in_flight) >= MAX_IN_FLIGHT:
                _complete(in_flight, active, pieces, comms)
        while in_flight:
            _complete(in_flight, active, pieces, comms)
    except BaseException:
        for bucket, packed, pending in in_flight:
            pending.exception()
            bucket.end_reduction(packed)
        drop(pieces)
        raise


def take_own(buckets: Iterable[Bucket], pieces: Mapping[Tensor, nn.Parameter]) -> None:
    """Set the pieces' gradients to their part of what the user has averaged already. No traffic."""
    for bucket in buckets:
        _accept(bucket.own_gradients(), pieces)


def drop(pieces: Mapping[Tensor, nn.Parameter]) -> None:
    """Forget the averaged gradients."""
    for piece in pieces.values():
        piece.grad = None


def gradients_of(pieces: Mapping[Tensor, nn.Parameter]) -> Sequence[Tensor]:
    """This rank's averaged gradients."""
    return [piece.grad for piece in pieces.values() if piece.grad is not None]


def _complete(
    in_flight: deque[tuple[Bucket, Tensor, Pending[Tensor]]],
    active: Mapping[Tensor, bool],
    pieces: Mapping[Tensor, nn.Parameter],
    comms: Communicators,
) -> None:
    bucket, packed, pending = in_flight.popleft()
    try:
        part = comms.wait(pending, f"reduce {bucket.label}")
    finally:
        bucket.end_reduction(packed)
    _accept({parameter: gradient for parameter, gradient in bucket.split_gradient(part).items() if active[parameter]}, pieces)


def _accept(gradients: Mapping[Tensor, Tensor], pieces: Mapping[Tensor, nn.Parameter]) -> None:
    for parameter, gradient in gradients.items():
        if parameter in pieces:
            pieces[parameter].grad = gradient.view(pieces[parameter].shape)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
