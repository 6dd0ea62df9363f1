from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("role", "version", "uptime_s", "rank", "world_size", "local_rank", "node_group", "epoch", "addresses", "step", "progress", "collectives", "bytes_sent", "bytes_received", "resident_bytes", "memory_peers", "borrowers", "routing", "connections", "late", "waiting", "stale_chunks")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEERS_FIELD_NUMBER: _ClassVar[int]
    BORROWERS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STALE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    role: str
    version: str
    uptime_s: float
    rank: int
    world_size: int
    local_rank: int
    node_group: int
    epoch: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    step: int
    progress: Progress
    collectives: _containers.RepeatedCompositeFieldContainer[CollectiveStats]
    bytes_sent: int
    bytes_received: int
    resident_bytes: int
    memory_peers: _containers.RepeatedScalarFieldContainer[int]
    borrowers: _containers.RepeatedScalarFieldContainer[int]
    routing: str
    connections: str
    late: _containers.RepeatedCompositeFieldContainer[Latecomer]
    waiting: _containers.RepeatedCompositeFieldContainer[Stuck]
    stale_chunks: int
    def __init__(self, role: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., node_group: _Optional[int] = ..., epoch: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., collectives: _Optional[_Iterable[_Union[CollectiveStats, _Mapping]]] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., memory_peers: _Optional[_Iterable[int]] = ..., borrowers: _Optional[_Iterable[int]] = ..., routing: _Optional[str] = ..., connections: _Optional[str] = ..., late: _Optional[_Iterable[_Union[Latecomer, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[Stuck, _Mapping]]] = ..., stale_chunks: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "total_steps", "loss", "tokens_per_s", "exposed_share", "note")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SHARE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    loss: float
    tokens_per_s: float
    exposed_share: float
    note: str
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., exposed_share: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class Latecomer(_message.Message):
    __slots__ = ("rank", "count", "seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    count: int
    seconds: float
    def __init__(self, rank: _Optional[int] = ..., count: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Stuck(_message.Message):
    __slots__ = ("collective", "seconds", "absent")
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    collective: str
    seconds: float
    absent: _containers.RepeatedCompositeFieldContainer[AbsentRank]
    def __init__(self, collective: _Optional[str] = ..., seconds: _Optional[float] = ..., absent: _Optional[_Iterable[_Union[AbsentRank, _Mapping]]] = ...) -> None: ...

class AbsentRank(_message.Message):
    __slots__ = ("rank", "address", "next_sequence", "last_entered")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTERED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    next_sequence: int
    last_entered: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., next_sequence: _Optional[int] = ..., last_entered: _Optional[str] = ...) -> None: ...

class CollectiveStats(_message.Message):
    __slots__ = ("op", "count", "bytes", "seconds", "failed", "waited_s")
    OP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    op: str
    count: int
    bytes: int
    seconds: float
    failed: int
    waited_s: float
    def __init__(self, op: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failed: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...
