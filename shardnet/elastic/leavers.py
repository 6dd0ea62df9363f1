"""`Leavers`: which ranks are told to leave, known to all ranks at the same step.

[Note: wishes to leave] Each commit begins an exchange of them and takes the result of the one that the commit before has begun, so that no
training waits for it: a wish is known two commits after it came at the latest. Then the step is made safe and saved, which takes a while,
and they ask once more, since those who are told to leave are often told together. Who is told still later is cancelled at once.
"""

import torch

from shardnet.backend import Backend, Pending
from shardnet.elastic.choice import apart
from shardnet.training import Departure


class Leavers:
    """The exchange in one epoch; thrown away when any member changes."""

    def __init__(self, backend: Backend, departure: Departure) -> None:
        self._backend = backend
        self._departure = departure
        self._told: Pending[torch.Tensor] | None = None

    async def any_at(self, step: int) -> bool:
        """Whether anybody leaves, as all ranks know by now. A collective; raises CollectiveMismatch if ranks commit different steps."""
        told, self._told = self._told, self._ask(f"who leaves after step {step}")
        return told is not None and bool((await told).any())

    async def agree(self, step: int, *, is_safe: bool) -> list[int]:
        """Who leaves now. Unless `is_safe` nobody does together with the one who keeps a copy of what it holds: that one leaves the next
        epoch. But all may, for then there is none. A collective."""
        wishes = (await self._ask(f"who leaves now, after step {step}")).tolist()
        wanting = [rank for rank, wish in enumerate(wishes) if wish]
        return wanting if is_safe or all(wishes) else apart(wanting, self._backend.node_ranks)

    def _ask(self, label: str) -> Pending[torch.Tensor]:
        mine = torch.tensor([self._departure.wanted], dtype=torch.uint8, device="cpu")
        return self._backend.all_gather(mine, label=label).quietly()
