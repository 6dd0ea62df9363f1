"""`Faults`: what should go wrong in a run.

    faults = Faults().delay(rank=0, at_step=2, seconds=1).kill(rank=2, at_step=5, after="forward")
    cluster.run(train, 4, faults=faults)

`run` raises FaultNotFired if a fault never came: then the test has tested nothing.
"""

from shardnet.errors import UsageError
from shardnet.testing.conditions import Conditions
from shardnet.testing.fault import ON_LINKS, STEP, Action, Fault
from shardnet.testing.harm import Kind


class Faults:
    """An order of faults; each method adds one and returns the whole. For all of them:

    rank     the rank that it concerns, as numbered in the first epoch of the workers that started together
    at_step  how many steps that rank has done by then, as the training tells `Cluster.report(step=...)` or `State.commit(step)`
    after    at the end of which event: "step", that is at once; "forward" or "backward" of a model that `Cluster.shard` has made; for
             `kill` and `freeze` also an operation of the backend, such as "all_gather" or "reduce_scatter"

    Each fires once, even if the training repeats the step afterwards.
    """

    def __init__(self) -> None:
        self.orders: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, at_step: int, after: str = STEP) -> "Faults":
        """The worker dies without a goodbye: SIGKILL for a process; for a thread its connections close and its task is cancelled."""
        return self._add(Fault(Action.KILL, rank, at_step, after))

    def freeze(self, *, rank: int, at_step: int, seconds: float, after: str = STEP) -> "Faults":
        """SIGSTOP, and SIGCONT after `seconds`. Only for processes."""
        return self._add(Fault(Action.FREEZE, rank, at_step, after, seconds))

    def delay(self, *, rank: int, at_step: int, seconds: float, after: str = STEP) -> "Faults":
        """The training takes `seconds` longer there, once; the worker answers meanwhile."""
        return self._add(Fault(Action.DELAY, rank, at_step, after, seconds))

    def join(self, *, at_step: int, rank: int = 0) -> "Faults":
        """Another worker is started, and `rank` waits until it has asked to join; a commit soon after takes it in. Only for elastic runs. A
        UsageError if `rank` is killed before that."""
        return self._add(Fault(Action.JOIN, rank, at_step))

    def cut(self, *, rank: int, at_step: int, seconds: float = 0.0, after: str = STEP) -> "Faults":
        """All connections to the worker are reset, and for `seconds` all new ones, too."""
        return self._add(Fault(Action.CUT, rank, at_step, after, seconds))

    def hold(self, *, rank: int, at_step: int, seconds: float, after: str = STEP) -> "Faults":
        """For `seconds` no data to or from the worker arrives; after that all of it does."""
        return self._add(Fault(Action.HOLD, rank, at_step, after, seconds))

    def harm(self, kind: Kind, *, rank: int, at_step: int, least_bytes: int = 1, after: str = STEP) -> "Faults":
        """Bytes that are sent to the worker are broken, doubled or lost, once: the first block of at least `least_bytes`. A block has at
        most 65536 bytes."""
        return self._add(Fault(Action.HARM, rank, at_step, after, kind=kind, least_bytes=least_bytes))

    def link(self, conditions: Conditions, *, rank: int, at_step: int = 0) -> "Faults":
        """From then on data to and from the worker comes late, slowly or in small pieces."""
        return self._add(Fault(Action.LINK, rank, at_step, conditions=conditions))

    @property
    def on_links(self) -> bool:
        """Whether workers need relays in front of them, and must send all data over connections."""
        return any(fault.action in ON_LINKS for fault in self.orders)

    @property
    def joiners(self) -> int:
        """How many workers join later."""
        return sum(fault.action is Action.JOIN for fault in self.orders)

    def _add(self, fault: Fault) -> "Faults":
        self.orders += (fault,)
        for join in self._of(Action.JOIN):
            if any(kill.rank == join.rank and kill.at_step < join.at_step for kill in self._of(Action.KILL)):
                raise UsageError(
                    f"no worker can join at step {join.at_step} of rank {join.rank}, which is killed before; give join() another rank"
                )
        return self

    def _of(self, action: Action) -> list[Fault]:
        return [fault for fault in self.orders if fault.action is action]
