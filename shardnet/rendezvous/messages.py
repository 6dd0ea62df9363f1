"""Converts between the rendezvous's Protobuf messages and its own types."""

from shardnet.errors import JoinRefused, ProtocolError, UsageError
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.printable import printable
from shardnet.rendezvous.events import Assigned, Ended, Event, JobState, JobStatus, Joiners, Lost, Waiting
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import PROTOCOL, JoinRequest, check_protocol
from shardnet.topology import Member, Topology
from shardnet.version import VERSION

SERVICE = "shardnet.v1.Rendezvous"


def write_request(request: JoinRequest) -> pb.JoinRequest:
    return pb.JoinRequest(
        protocol=PROTOCOL,
        version=VERSION,
        job=request.job,
        incarnation=request.incarnation,
        address=request.address,
        node=request.node,
        min_world_size=request.min_world_size,
        max_world_size=request.max_world_size,
        local_rank_hint=request.local_rank_hint,
        elastic=request.elastic,
        previous=request.previous,
        last_epoch=request.last_epoch,
        missing=request.missing,
        replacement=request.replacement,
        resumes=request.resumes,
        wished_rank=request.wished_rank,
    )


def read_request(message: pb.JoinRequest) -> JoinRequest:
    """Raises JoinRefused. Another protocol is refused first, because its fields may mean something else."""
    check_protocol(message.protocol, message.version)
    try:
        return JoinRequest(
            job=message.job,
            incarnation=message.incarnation,
            address=message.address,
            node=message.node,
            min_world_size=message.min_world_size,
            max_world_size=message.max_world_size,
            local_rank_hint=message.local_rank_hint,
            elastic=message.elastic,
            previous=message.previous,
            last_epoch=message.last_epoch,
            missing=tuple(message.missing),
            replacement=message.replacement,
            resumes=message.resumes,
            wished_rank=message.wished_rank if message.HasField("wished_rank") else None,
        )
    except UsageError as error:
        raise JoinRefused(f"the join request is not valid: {error}", Refusal.MALFORMED) from error


def write_event(event: Event) -> pb.MembershipEvent:
    match event:
        case Waiting(joined, least, most, is_running):
            waiting = pb.Waiting(joined=joined, min_world_size=least, max_world_size=most, is_running=is_running)
            return pb.MembershipEvent(waiting=waiting)
        case Assigned(topology):
            members = [_write_member(m) for m in topology.members]
            return pb.MembershipEvent(assignment=pb.Assignment(epoch=topology.epoch, rank=topology.rank, members=members))
        case Lost(epoch, rank, reason, left):
            return pb.MembershipEvent(lost=pb.MemberLost(epoch=epoch, rank=rank, reason=reason, left=left))
        case Joiners(count, spares):
            return pb.MembershipEvent(joiners=pb.Joiners(count=count, spares=spares))
        case Ended():
            return pb.MembershipEvent(ended=pb.Ended())


def read_event(message: pb.MembershipEvent) -> Event:
    """Raises ProtocolError for an event that this version does not know or that contradicts itself."""
    match message.WhichOneof("kind"):
        case "waiting":
            waiting = message.waiting
            return Waiting(waiting.joined, waiting.min_world_size, waiting.max_world_size, waiting.is_running)
        case "assignment":
            return Assigned(_read_topology(message.assignment))
        case "lost":
            lost = message.lost
            return Lost(lost.epoch, lost.rank, lost.reason, lost.left)
        case "joiners":
            return Joiners(message.joiners.count, message.joiners.spares)
        case "ended":
            return Ended()
        case _:
            raise ProtocolError("the rendezvous sent an event of an unknown kind; install the same version of shardnet on both")


def write_status(status: JobStatus) -> pb.JobStatus:
    return pb.JobStatus(
        job=status.job,
        state=status.state,
        epoch=status.epoch,
        joined=status.joined,
        min_world_size=status.min_world_size,
        max_world_size=status.max_world_size,
        members=[_write_member(m) for m in status.members],
        absent=status.absent,
        first_lost=status.first_lost,
    )


def read_status(message: pb.JobStatus) -> JobStatus:
    """Raises ProtocolError for a state that this version does not know."""
    try:
        state = JobState(message.state)
    except ValueError as error:
        raise ProtocolError(
            f"the rendezvous reports job {message.job!r} in the unknown state {message.state!r}; "
            "install the same version of shardnet on both"
        ) from error
    return JobStatus(
        job=message.job,
        state=state,
        epoch=message.epoch,
        joined=message.joined,
        min_world_size=message.min_world_size,
        max_world_size=message.max_world_size,
        members=tuple(_read_member(m) for m in message.members),
        absent=message.absent,
        first_lost=printable(message.first_lost),
    )


def _read_topology(message: pb.Assignment) -> Topology:
    members = tuple(_read_member(m) for m in message.members)
    if message.rank >= len(members) or any(m.rank != i for i, m in enumerate(members)):
        raise ProtocolError(
            f"the rendezvous assigned rank {message.rank} in a world with the ranks {[m.rank for m in members]}; "
            "these must be 0, 1, 2, … and include the assigned one"
        )
    return Topology(message.epoch, message.rank, members)


def _write_member(member: Member) -> pb.Member:
    return pb.Member(
        rank=member.rank,
        local_rank=member.local_rank,
        node_group=member.node_group,
        address=member.address,
        node=member.node,
        incarnation=member.incarnation,
        identity=member.identity,
    )


def _read_member(message: pb.Member) -> Member:
    return Member(
        *(message.rank, message.local_rank, message.node_group, message.address, message.node, message.incarnation, message.identity)
    )
