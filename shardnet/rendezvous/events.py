"""What the rendezvous tells its members, and what it says about a job when asked."""

from dataclasses import dataclass
from enum import StrEnum

from shardnet.topology import Member, Topology


@dataclass(frozen=True, slots=True)
class Waiting:
    """The world is not complete. Sent at every change; a newer one replaces older ones."""

    joined: int
    min_world_size: int
    max_world_size: int
    is_running: bool = False  # whether there are workers with ranks, which must end their epoch first

    @property
    def is_full(self) -> bool:
        """Whether the job has all of its workers, and the receiver is one more that waits for a place."""
        return self.joined > self.max_world_size


@dataclass(frozen=True, slots=True)
class Assigned:
    """The world is complete, and this is the receiver's place in it."""

    topology: Topology


@dataclass(frozen=True, slots=True)
class Lost:
    """Another member of the running world is gone."""

    epoch: int
    rank: int
    reason: str
    left: bool  # it said goodbye


@dataclass(frozen=True, slots=True)
class Joiners:
    """How many workers would be taken in if the members of an elastic job formed a new epoch now, and for how many more there would be no
    room. A newer one replaces older ones."""

    count: int
    spares: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The receiver waits to join a job whose members leave with a goodbye: there will be no next epoch."""


Event = Waiting | Assigned | Lost | Joiners | Ended


@dataclass(frozen=True, slots=True)
class Notice:
    """An event and the incarnation of its receiver."""

    to: str
    event: Event


class JobState(StrEnum):
    FORMING = "forming"  # members come and go freely; RUNNING follows when enough are there
    # ranks are given out; members only go. When all are gone FINISHED follows, or FORMING if workers wait for the next epoch, as
    # they may in an elastic job
    RUNNING = "running"
    FINISHED = "finished"  # nobody is left; the next worker that joins makes it FORMING again, for a higher epoch
    LOST = "lost"  # onlookers are told this instead of FINISHED if the last members vanished instead of leaving


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job as an onlooker sees it. `epoch` is the newest epoch number that is used up."""

    job: str
    state: JobState
    epoch: int
    joined: int  # members, and workers that wait to become members
    min_world_size: int
    max_world_size: int
    members: tuple[Member, ...]  # the live ones by rank; empty unless RUNNING
    absent: int = 0  # how many of the members have no connection now, and may come back
    first_lost: str = ""  # which member was lost first, in the last epoch that lost one, and why
