"""Averaging gradients over ranks, bucket by bucket, so that each rank gets the gradients of its own pieces."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardnet.backend import Pending
from shardnet.errors import StateError
from shardnet.fsdp.communicators import Communicators
from shardnet.uncompiled import uncompiled
from shardnet.zero.bucket import Bucket, Owned

Tensor = torch.Tensor
MAX_IN_FLIGHT = 2  # packed buckets: one is packed while the other one is on its way


class Sources:
    """The gradients of some parameters at one moment."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._seen = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]

    @property
    def current(self) -> bool:
        """Whether they are still the same."""
        return all(parameter.grad is gradient and _version(gradient) == version for parameter, gradient, version in self._seen)


class ReducedGradients:
    """The averaged gradients of one step; they lie in the pieces' `grad` and are dropped after the step."""

    def __init__(self, stepped: Sequence[Owned], parameters: Iterable[Tensor]) -> None:
        self.stepped = tuple(stepped)  # the buckets in which any parameter has a gradient
        self._sources = Sources(parameters)

    def check_current(self) -> None:
        """Raise StateError if a gradient was changed after it was reduced: the change would be lost."""
        if not self._sources.current:
            raise StateError(
                "gradients changed after clip_grad_norm_(), last_backward() or a scaler's unscale_() had averaged them: clip and unscale "
                "after the last backward, and clear gradients with the optimizer's zero_grad()"
            )


@uncompiled
class Reductions:
    """The averages of one step's gradients over ranks, bucket after bucket; thrown away after the step.

    [Note: order of reductions] Reductions are in backward's order, the last unit's first, on all ranks; buckets that were
    frozen when the optimizer was made come last, since they would hold up the others. Within `in_backward` a bucket whose
    gradients are complete waits until those before it have started, and buckets that cannot start wait for `finish`. So
    ranks that have come to different places, for example because a parameter is unused on some, still reduce the same
    bucket with each other. A bucket starts early only if all its parameters have gradients, so no rank can conclude that it
    is left out; if its gradients change on any rank after that, all ranks reduce it again.

    [Note: no waiting in backward] A rank that has ended its backward waits for the others to agree on what is left. If one of
    those waited in its backward for a reduction that the first rank has not started, neither would go on. So if enough
    reductions are under way, the next bucket starts later, at another gradient or in `finish`.
    """

    def __init__(self, buckets: Iterable[Bucket], pieces: Mapping[Tensor, nn.Parameter], comms: Communicators) -> None:
        backward = list(buckets)[::-1]
        self._order = sorted(backward, key=lambda bucket: bucket.born_frozen)
        self._pieces = pieces
        self._comms = comms
        self._missing = {bucket: set(map(id, bucket.parameters)) for bucket in self._order}  # parameters without a gradient so far
        self._early: dict[Bucket, Sources] = {}  # buckets started in backward, with their gradients at that moment
        self._in_flight: deque[tuple[Bucket, Tensor, Pending[Tensor]]] = deque()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within this context, start the reduction of each bucket when all its parameters have got gradients."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))  # type: ignore[no-untyped-call]  # torch has no annotation for it
            for bucket in self._order
            for parameter in bucket.parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def changed(self) -> list[bool]:
        """For each bucket, in an order that is the same on all ranks: whether it has started too early."""
        return [bucket in self._early and not self._early[bucket].current for bucket in self._order]

    def finish(self, active: Mapping[Tensor, bool], again: Sequence[bool]) -> None:
        """Set the pieces' gradients to the mean over ranks; None where `active` says that no rank has a gradient. A collective.

        `again` says, as `changed` does, which buckets have started too early on any rank. On an error no piece has a gradient,
        and nothing is under way any more.
        """
        try:
            for bucket in self._order:
                if bucket not in self._early and any(active[parameter] for parameter in bucket.parameters):
                    self._start(bucket)
            for bucket, repeat in zip(self._order, again, strict=True):
                if repeat:
                    self._start(bucket)
            while self._in_flight:
                self._complete()
        except BaseException:
            self.abandon()
            raise
        for parameter, piece in self._pieces.items():
            if not active[parameter]:
                piece.grad = None

    def abandon(self) -> None:
        """Wait for what is under way, whether it succeeds or fails, and forget what was averaged."""
        for bucket, packed, pending in self._in_flight:
            pending.exception()
            bucket.end_reduction(packed)
        self._in_flight.clear()
        drop(self._pieces)

    @torch.no_grad()
    def _arrived(self, bucket: Bucket, parameter: Tensor) -> None:
        self._missing[bucket].discard(id(parameter))
        for following in self._order[len(self._early) :]:
            while self._in_flight and self._in_flight[0][2].done():
                self._complete()
            if self._missing[following] or len(self._in_flight) >= MAX_IN_FLIGHT:
                return
            self._early[following] = Sources(following.parameters)
            self._start(following)

    def _start(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._complete()
        self._in_flight.append((bucket, *bucket.start_reduction()))

    def _complete(self) -> None:
        bucket, packed, pending = self._in_flight.popleft()
        try:
            part = self._comms.wait(pending, f"reduce {bucket.label}")
        finally:
            bucket.end_reduction(packed)
        _accept(bucket.split_gradient(part), self._pieces)


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


def _accept(gradients: Mapping[Tensor, Tensor], pieces: Mapping[Tensor, nn.Parameter]) -> None:
    for parameter, gradient in gradients.items():
        if parameter in pieces:
            pieces[parameter].grad = gradient.view(pieces[parameter].shape)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
