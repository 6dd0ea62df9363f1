"""What the rendezvous tells its members, and what it says of a job when asked."""

from dataclasses import dataclass
from enum import StrEnum

from shardnet.topology import Member, Topology


@dataclass(frozen=True, slots=True)
class Waiting:
    """The world is not complete. Sent at every change; a newer one makes older ones worthless."""

    joined: int
    min_world_size: int
    max_world_size: int


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
    """So many workers would be taken in if the members of an elastic job formed a new epoch now. A newer one makes older ones worthless."""

    count: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The receiver waits to join a job whose members leave in peace: there will be no next epoch."""


Event = Waiting | Assigned | Lost | Joiners | Ended


@dataclass(frozen=True, slots=True)
class Notice:
    """An event and the incarnation that it is for."""

    to: str
    event: Event


class JobState(StrEnum):
    FORMING = "forming"  # members come and go freely; RUNNING comes when enough are there
    # ranks are given out; members only go. FINISHED comes when all are gone, or FORMING if workers wait for the next epoch, as
    # they may in an elastic job
    RUNNING = "running"
    FINISHED = "finished"  # nobody is left; the next worker that joins makes it FORMING again, for a higher epoch
    LOST = "lost"  # what onlookers are told in place of FINISHED where the last ones have not left, but vanished


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job as an onlooker sees it. `epoch` is the newest one that is used up."""

    job: str
    state: JobState
    epoch: int
    joined: int  # members, and who waits to be one
    min_world_size: int
    max_world_size: int
    members: tuple[Member, ...]  # the live ones by rank; empty unless RUNNING
    absent: int = 0  # of these, have not come back since the rendezvous was started again
