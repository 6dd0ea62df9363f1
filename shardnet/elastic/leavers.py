"""`Leavers`: tells all ranks at the same step which ranks were told to leave.

[Note: wishes to leave] Each commit begins an exchange of wishes and takes the result of the exchange that the commit before began, so that
no training waits for it: all ranks know a wish at the latest two commits after it came. Then the step is made safe and saved, which takes
a while, and the ranks ask again until nobody was told meanwhile, because workers that must leave are often told together. A worker that is
told still later leaves in the next epoch. In a job that is not elastic there is none, and all end.
"""

import torch

from shardnet.backend import Backend, Pending
from shardnet.training import Departure


class Leavers:
    """The exchange in one epoch; thrown away when any member changes."""

    def __init__(self, backend: Backend, departure: Departure) -> None:
        self._backend = backend
        self._departure = departure
        self._told: Pending[torch.Tensor] | None = None

    async def any_at(self, step: int) -> bool:
        """Whether any rank leaves, as far as all ranks know by now. A collective; raises CollectiveMismatch if ranks commit different
        steps."""
        told, self._told = self._told, self._ask(f"requests to leave after step {step}")
        return told is not None and bool((await told).any())

    async def agree(self, step: int, *, one_stays: bool) -> list[int]:
        """The ranks that leave now. If all wish to, and `one_stays`, the first one does not leave yet. A collective."""
        wishes = (await self._ask(f"last requests to leave after step {step}")).tolist()
        leaving = [rank for rank, wish in enumerate(wishes) if wish]
        return leaving[1:] if one_stays and all(wishes) else leaving

    def _ask(self, label: str) -> Pending[torch.Tensor]:
        mine = torch.tensor([self._departure.wanted], dtype=torch.uint8, device="cpu")
        return self._backend.all_gather(mine, label=label).quietly()
