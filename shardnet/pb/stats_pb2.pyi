from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("role", "version", "uptime_s", "rank", "world_size", "local_rank", "node_group", "epoch", "addresses", "step", "progress", "collectives", "bytes_sent", "bytes_received", "resident_bytes", "memory_peers", "borrowers", "routing", "connections", "late", "waiting", "stale_chunks", "serving", "metrics", "bounds_s", "nodes", "node_groups", "epochs", "losses", "steps", "exposed_s", "stalls", "peers", "link_bytes_per_s", "memory", "jobs")
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
    SERVING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NODE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
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
    serving: bool
    metrics: str
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    node_groups: _containers.RepeatedScalarFieldContainer[int]
    epochs: int
    losses: int
    steps: Steps
    exposed_s: float
    stalls: Stalls
    peers: _containers.RepeatedCompositeFieldContainer[PeerTraffic]
    link_bytes_per_s: float
    memory: Memory
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, role: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., node_group: _Optional[int] = ..., epoch: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., collectives: _Optional[_Iterable[_Union[CollectiveStats, _Mapping]]] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., memory_peers: _Optional[_Iterable[int]] = ..., borrowers: _Optional[_Iterable[int]] = ..., routing: _Optional[str] = ..., connections: _Optional[str] = ..., late: _Optional[_Iterable[_Union[Latecomer, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[Stuck, _Mapping]]] = ..., stale_chunks: _Optional[int] = ..., serving: _Optional[bool] = ..., metrics: _Optional[str] = ..., bounds_s: _Optional[_Iterable[float]] = ..., nodes: _Optional[_Iterable[str]] = ..., node_groups: _Optional[_Iterable[int]] = ..., epochs: _Optional[int] = ..., losses: _Optional[int] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., exposed_s: _Optional[float] = ..., stalls: _Optional[_Union[Stalls, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerTraffic, _Mapping]]] = ..., link_bytes_per_s: _Optional[float] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("counts", "seconds", "exposed_s")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    exposed_s: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., exposed_s: _Optional[float] = ...) -> None: ...

class Stalls(_message.Message):
    __slots__ = ("count", "seconds")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    count: int
    seconds: float
    def __init__(self, count: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PeerTraffic(_message.Message):
    __slots__ = ("rank", "sent_network", "sent_memory", "received_network", "received_memory")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SENT_NETWORK_FIELD_NUMBER: _ClassVar[int]
    SENT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NETWORK_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    sent_network: int
    sent_memory: int
    received_network: int
    received_memory: int
    def __init__(self, rank: _Optional[int] = ..., sent_network: _Optional[int] = ..., sent_memory: _Optional[int] = ..., received_network: _Optional[int] = ..., received_memory: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("peak_resident", "shared", "device_allocated", "device_reserved", "device_peak")
    PEAK_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_RESERVED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PEAK_FIELD_NUMBER: _ClassVar[int]
    peak_resident: int
    shared: int
    device_allocated: int
    device_reserved: int
    device_peak: int
    def __init__(self, peak_resident: _Optional[int] = ..., shared: _Optional[int] = ..., device_allocated: _Optional[int] = ..., device_reserved: _Optional[int] = ..., device_peak: _Optional[int] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "state", "epoch", "joined", "min_world_size", "max_world_size", "absent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    MIN_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    epoch: int
    joined: int
    min_world_size: int
    max_world_size: int
    absent: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., joined: _Optional[int] = ..., min_world_size: _Optional[int] = ..., max_world_size: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("rank", "address", "next_sequence", "last_entered", "waits_in")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTERED_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    next_sequence: int
    last_entered: str
    waits_in: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., next_sequence: _Optional[int] = ..., last_entered: _Optional[str] = ..., waits_in: _Optional[str] = ...) -> None: ...

class CollectiveStats(_message.Message):
    __slots__ = ("op", "count", "bytes", "seconds", "failed", "waited_s", "counts")
    OP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    op: str
    count: int
    bytes: int
    seconds: float
    failed: int
    waited_s: float
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, op: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failed: _Optional[int] = ..., waited_s: _Optional[float] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...
