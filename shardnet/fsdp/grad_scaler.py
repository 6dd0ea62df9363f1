"""`GradScaler`: torch's gradient scaling for float16, decided by all ranks together."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

from shardnet.backend import Backend, ReduceOp


@runtime_checkable
class AveragingOptimizer(Protocol):
    """One that averages gradients over ranks itself and steps slices of them, as `shardnet.zero.ZeroOptimizer` does."""

    def average_gradients(self) -> torch.optim.Optimizer:
        """Average them, unless that is done; returns the optimizer of this rank's slices, whose gradients they are. A collective."""

    def stepped_alike(self) -> AbstractContextManager[None]:
        """Within it the optimizer is stepped on all ranks or on none; gradients of a step that is left out are dropped."""


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for parameters that are spread over ranks: a step is skipped on all of them or on none.

        scaler = GradScaler(backend)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only in order to clip in between
        scaler.step(optimizer)
        scaler.update()

    A rank sees only the gradients of its own shards, so only one rank finds a gradient that overflows. The others would step,
    and double their scale at other times. Here `unscale_`, and a `step` without it, is a collective: one all-reduce of two
    numbers. So the scale is the same everywhere, and everything else is torch's own, for optimizers with fused steps as well.

    A `ZeroOptimizer` is scaled by it, too. `unscale_`, and a `step` without it, then averages gradients first, unless
    `last_backward` has done so, and unscales the averages: the parameters' own `grad` stays scaled. Clip in between with the
    optimizer's `clip_grad_norm_`.

    Compute the loss in float32 (`MixedPrecision(output_dtype=torch.float32)`), where scaling it cannot overflow.
    Making it is a collective in that all ranks must make it, and other sub-groups, in the same order. The backend is not closed.
    """

    # torch/distributed/fsdp/sharded_grad_scaler.py agrees only in `unscale_`, which is not called for an optimizer with a fused step.

    def __init__(
        self,
        backend: Backend,
        *,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._ranks = backend.subgroup(range(backend.world_size))  # numbered apart from the user's own collectives

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients, unless that is done, and step if they are finite on all ranks. A collective."""
        with optimizer.stepped_alike() if isinstance(optimizer, AveragingOptimizer) else nullcontext():
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients, and return for each device whether any rank found one that is not finite."""
        held = optimizer.average_gradients() if isinstance(optimizer, AveragingOptimizer) else optimizer
        found = super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16)
        own = [float(bool(found)), max((flag.item() for flag in found.values()), default=0.0)]
        agreed = self._ranks.all_reduce(torch.tensor(own, device="cpu"), ReduceOp.MAX, label="whether gradients are finite")
        any_gradient, overflow = agreed.wait().tolist()
        if any_gradient and not found:  # none of the parameters that have gradients is this rank's: it steps with the others
            found = {found_inf.device: found_inf}
        for flag in found.values():
            flag.fill_(overflow)
        return found
