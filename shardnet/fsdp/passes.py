"""What happened in one forward, and what happened so far in one backward."""

from collections import Counter
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.unit import Unit, UnitState

# A gradient that backward brings: the group and the number of its parameter, and whether it is one of [Note: gradients from elsewhere] in
# elsewhere.py. One is made for each gradient in each backward, so it is a plain tuple.
Wanted = tuple[FlatGroup, int, bool]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One forward of one unit. The hooks on its inputs and outputs carry it into backward."""

    unit: Unit
    forward: "ForwardPass"
    thread: int
    resumes: str | None = None  # what the thread computed before, and goes on with after it
    number: int | None = None  # its place in `forward.calls`; None for a recomputation and until it has ended
    inner: bool = False  # within another call of the same unit, which outlasts it
    part: nn.Module | None = None  # the part of the unit that was called alone, if one was
    again: int = 0  # how often `part` is being called within its own call
    hooks: list[RemovableHandle] = field(default_factory=list)  # on the graph, which lives as long as somebody holds the outputs


@dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward of the outermost unit, from its first hook on. Its outputs carry it into their backward."""

    order: list[Unit] = field(default_factory=list)  # every unit that ran, in order of first use
    tracked: list[Unit] = field(default_factory=list)  # those that ran with gradients on, in order of first use
    calls: list[Unit] = field(default_factory=list)  # one entry per call that backward will come back to, in order of end
    reduced: bool = False  # the gradients of `tracked` have been reduced

    def entered(self, unit: Unit, *, grad: bool) -> None:
        if unit not in self.order:
            self.order.append(unit)
        if grad and unit not in self.tracked:
            self.tracked.append(unit)

    def left(self, call: Call) -> None:
        """Note the end of a call that has outputs with gradients."""
        call.number = len(self.calls)
        self.calls.append(call.unit)

    @property
    def repeated(self) -> list[Unit]:
        """Units that backward will come back to more than once."""
        return [unit for unit, times in Counter(self.calls).items() if times > 1]

    def before(self, call: Call, count: int) -> list[Unit]:
        """The first `count` units, other than that of `call`, that backward reaches after it."""
        found: list[Unit] = []
        for unit in reversed(self.calls[: call.number or 0]):
            if len(found) == count:
                break
            if unit is not call.unit and unit not in found:
                found.append(unit)
        return found

    def repeats(self, call: Call) -> bool:
        """Whether backward goes on with the same unit after `call`: a unit used several times in a row."""
        return call.number is not None and call.number > 0 and self.calls[call.number - 1] is call.unit


@dataclass(slots=True, eq=False)
class BackwardPass:
    """One call of backward, from its first hook to the engine's final callback."""

    forwards: list[ForwardPass] = field(default_factory=list)  # whose outputs it came through
    units: dict[Unit, None] = field(default_factory=dict)  # that owe a reduction, in the order of reductions, which a dict keeps
    received: bool = False  # any gradient has come; none does in torch.autograd.grad with respect to inputs
    computes: bool = False  # backward has reached what forward computed; before that only gradients from elsewhere can come
    finished: list[Unit] = field(default_factory=list)  # have all gradients, may still hold full parameters
    _open: dict[Unit, set[Call]] = field(default_factory=dict)  # calls that backward has reached and not finished
    _reached: dict[ForwardPass, int] = field(default_factory=dict)  # the earliest call that backward has reached
    _missing: dict[Unit, set[Wanted]] = field(default_factory=dict)

    def advances(self, call: Call) -> bool:
        """Whether backward has come further than before. It has not where an outer unit returns an inner one's output as
        it is: then the inner one's hook runs first."""
        if call.number is None or call.number >= self._reached.get(call.forward, len(call.forward.calls)):
            return False
        self._reached[call.forward] = call.number
        return True

    def opened(self, call: Call) -> None:
        """Backward has come to a call."""
        if not call.inner:
            self._open.setdefault(call.unit, set()).add(call)

    def closed(self, call: Call) -> bool:
        """Backward has finished a call; returns whether it needs the unit no more. It still does where another call of the
        unit is open: if the output of one call is the input of the next, backward opens the first call before it closes
        the next."""
        still_open = self._open.get(call.unit, set())
        still_open.discard(call)
        return not still_open

    def missing(self, unit: Unit) -> set[Wanted]:
        """The gradients that the unit waits for."""
        if unit not in self._missing:
            own = {(group, index, False) for group in unit.groups for index in group.trainable}
            self._missing[unit] = own.union((group, index, True) for group in unit.groups for index in group.elsewhere.expected)
        return self._missing[unit]

    def arrived(self, unit: Unit, gradient: Wanted) -> bool:
        """Note a gradient; returns whether it was the unit's last one."""
        self.received = True
        missing = self.missing(unit)
        was_last = missing == {gradient}
        missing.discard(gradient)
        return was_last

    def owe(self, units: list[Unit]) -> list[Unit]:
        """Add units to those that owe a reduction; returns the new ones."""
        new = [unit for unit in units if unit not in self.units]
        self.units.update(dict.fromkeys(new))
        return new

    def take_finished(self, now: Unit) -> list[Unit]:
        """Finished units other than `now` that still hold full parameters; they are forgotten here."""
        done = [unit for unit in self.finished if unit is not now and unit.state is UnitState.BACKWARD]
        self.finished = [unit for unit in self.finished if unit is now]
        return done
