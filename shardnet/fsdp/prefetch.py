"""`Prefetcher`: gathers the units that come next while the current one computes."""

from collections.abc import Sequence

import torch

from shardnet.backend import Pending, ReduceOp
from shardnet.errors import StateError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.passes import Call, ForwardPass
from shardnet.fsdp.unit import Unit, UnitState


class Prefetcher:
    """Keeps the gathers under way to a window: the unit that is needed now and the `depth` next ones.

    So the memory in flight is bounded whatever the depth of the model, even if a forward takes another path than the
    one before: a unit that was gathered in vain is freed as soon as the window has moved past it.
    """

    # The next gathers are started before the current one is waited for: where the network is the bottleneck it never
    # idles between two gathers.

    def __init__(self, units: Sequence[Unit], depth: int, comms: Communicators, *, keep: bool = False) -> None:
        self.depth = depth
        self.keep = keep  # every unit stays gathered until its backward is done
        self._units = units
        self._comms = comms
        self._order = list(units)  # of first use: registration order until a forward has shown the real one
        self._explicit: dict[Unit, list[Pending[None]]] = {}  # asked for by the user, for the next forward

    # --- implicit

    def learn(self, forward: ForwardPass) -> None:
        """Expect the next forward to use the units in the same order as this one."""
        self._order = list(forward.order)

    def in_forward(self, unit: Unit) -> None:
        """Start gathering `unit`, and what comes after it in forward."""
        position = self._order.index(unit) + 1 if unit in self._order else len(self._order)
        self._move_to(unit, self._order[position : position + self.depth], for_backward=False)

    def in_backward(self, call: Call) -> None:
        """Start gathering the unit of `call`, and what comes after it in backward."""
        self._move_to(call.unit, call.forward.before(call, self.depth), for_backward=True)

    def only(self, unit: Unit) -> None:
        """Start gathering `unit` within backward; what is gathered ahead stays as it is."""
        if unit.state is UnitState.SHARDED:
            unit.start_gather(for_backward=True)

    @property
    def has_room(self) -> bool:
        """Whether one more unit may be held: fewer than `depth` are gathered ahead or held."""
        return self.keep or sum(unit.state in (UnitState.GATHERING, UnitState.HELD) for unit in self._units) < self.depth

    def stop(self) -> None:
        """Free what was gathered ahead and not used, except an explicit prefetch."""
        for unit in self._units:
            if unit.state is UnitState.GATHERING and unit not in self._explicit:
                unit.discard()

    def reset(self) -> None:
        """Free everything that was gathered ahead."""
        self._forget_explicit()
        self.stop()

    def _move_to(self, now: Unit, following: Sequence[Unit], *, for_backward: bool) -> None:
        window = (now, *following)
        room = self.depth - len(following)  # for units that are held
        for unit in self._units:
            if unit not in window and unit.state is UnitState.HELD and not self.keep:
                room -= 1
                if room < 0:
                    unit.reshard(backward_follows=True)
            elif unit not in window and unit.state is UnitState.GATHERING and unit not in self._explicit:
                unit.discard()
        for unit in window:
            if unit.state is UnitState.SHARDED:
                unit.start_gather(for_backward=for_backward)

    # --- explicit

    @property
    def explicit_pending(self) -> bool:
        return bool(self._explicit)

    def start_explicit(self) -> list[Pending[None]]:
        """Start gathering what the next forward needs first: its first unit and `depth` more."""
        if self._explicit:
            raise StateError("prefetch_forward_params was called twice before forward(); call forward() to use the first prefetch")
        return self._start_explicit(self._order[: self.depth + 1])

    def gather_all(self) -> None:
        """Gather every unit again, for the next forward, and wait."""
        self.reset()
        for pending in self._start_explicit(self._units):
            self._comms.wait(pending, "gather updated parameters")

    def _start_explicit(self, units: Sequence[Unit]) -> list[Pending[None]]:
        self._comms.shards.changed()
        for unit in units:
            if unit.state is UnitState.HELD:
                unit.reshard()  # a backward that still comes uses what is gathered now
            # The handles give None: the gathered bytes belong to the unit, which frees them. Nobody has to await them: forward does.
            self._explicit[unit] = [pending.map(lambda _: None).quietly() for pending in unit.start_gather()]
        return self.explicit_handles

    @property
    def explicit_handles(self) -> list[Pending[None]]:
        return [pending for pendings in self._explicit.values() for pending in pendings]

    def consume_explicit(self) -> None:
        """Make sure that the prefetched units hold what the shards hold now; a collective if anything was prefetched.

        An optimizer step, `update_shards` or any other change since the prefetch shows as a difference between this
        rank's shard and its own part of the gathered buffer. One tiny all-reduce makes all ranks gather such a unit
        again, whichever rank saw the change.
        """
        units = [unit for unit in self._explicit if unit.state is UnitState.GATHERING]  # a backward in between uses them up
        for unit in units:
            unit.wait_gathered()
        self._forget_explicit()
        if units:
            for unit, changed in zip(units, self._changed(units), strict=True):
                if changed:
                    unit.discard()
                    unit.start_gather()

    def _forget_explicit(self) -> None:
        """Wait for the handles that the user may have dropped, so that none is lost with its error unseen."""
        explicit, self._explicit = self._explicit, {}
        for pending in (pending for pendings in explicit.values() for pending in pendings):
            pending.exception()

    def _changed(self, units: Sequence[Unit]) -> list[bool]:
        device = next((group.shard.device for unit in units for group in unit.groups), None)
        stale = [not all(group.is_fresh() for group in unit.groups) for unit in units]
        flags = torch.tensor(stale, dtype=torch.int32, device=device)
        agreed = self._comms.gathers.all_reduce(flags, ReduceOp.MAX, label="whether prefetched parameters changed")
        return [bool(flag) for flag in self._comms.wait(agreed, "check prefetch").tolist()]
