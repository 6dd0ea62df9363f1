from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "version", "job", "incarnation", "address", "node", "min_world_size", "max_world_size", "local_rank_hint", "elastic", "previous", "last_epoch", "missing", "wished_rank", "replacement", "resumes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MIN_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_HINT_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WISHED_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    job: str
    incarnation: str
    address: str
    node: str
    min_world_size: int
    max_world_size: int
    local_rank_hint: int
    elastic: bool
    previous: str
    last_epoch: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    wished_rank: int
    replacement: bool
    resumes: bool
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., min_world_size: _Optional[int] = ..., max_world_size: _Optional[int] = ..., local_rank_hint: _Optional[int] = ..., elastic: _Optional[bool] = ..., previous: _Optional[str] = ..., last_epoch: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., wished_rank: _Optional[int] = ..., replacement: _Optional[bool] = ..., resumes: _Optional[bool] = ...) -> None: ...

class MembershipEvent(_message.Message):
    __slots__ = ("waiting", "assignment", "lost", "joiners", "ended")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    waiting: Waiting
    assignment: Assignment
    lost: MemberLost
    joiners: Joiners
    ended: Ended
    def __init__(self, waiting: _Optional[_Union[Waiting, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., lost: _Optional[_Union[MemberLost, _Mapping]] = ..., joiners: _Optional[_Union[Joiners, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("joined", "min_world_size", "max_world_size", "is_running")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MIN_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    joined: int
    min_world_size: int
    max_world_size: int
    is_running: bool
    def __init__(self, joined: _Optional[int] = ..., min_world_size: _Optional[int] = ..., max_world_size: _Optional[int] = ..., is_running: _Optional[bool] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("epoch", "rank", "members")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "local_rank", "node_group", "address", "node", "incarnation", "identity")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_GROUP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    local_rank: int
    node_group: int
    address: str
    node: str
    incarnation: str
    identity: str
    def __init__(self, rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., node_group: _Optional[int] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class MemberLost(_message.Message):
    __slots__ = ("epoch", "rank", "reason", "left")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    reason: str
    left: bool
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., left: _Optional[bool] = ...) -> None: ...

class Joiners(_message.Message):
    __slots__ = ("count", "spares")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    count: int
    spares: int
    def __init__(self, count: _Optional[int] = ..., spares: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("job", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FailRequest(_message.Message):
    __slots__ = ("job", "incarnation", "why", "follows")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    job: str
    incarnation: str
    why: str
    follows: bool
    def __init__(self, job: _Optional[str] = ..., incarnation: _Optional[str] = ..., why: _Optional[str] = ..., follows: _Optional[bool] = ...) -> None: ...

class FailReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "state", "epoch", "joined", "min_world_size", "max_world_size", "members", "absent", "first_lost")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MIN_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOST_FIELD_NUMBER: _ClassVar[int]
    job: str
    state: str
    epoch: int
    joined: int
    min_world_size: int
    max_world_size: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    absent: int
    first_lost: str
    def __init__(self, job: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., joined: _Optional[int] = ..., min_world_size: _Optional[int] = ..., max_world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., absent: _Optional[int] = ..., first_lost: _Optional[str] = ...) -> None: ...
