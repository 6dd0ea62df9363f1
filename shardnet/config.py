"""Settings, as frozen values that are checked when they are made."""

from dataclasses import dataclass
from enum import StrEnum

from shardnet.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
_LETTERS = 4  # how many letters of the largest size a mailbox holds; letters that find no room go over gRPC
_PIECES = 4  # of a window: one is written, one is read, and the rest let each side run ahead; more would cost more messages


def _positive(owner: object, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{type(owner).__name__}.{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds, before an error says which rank is missing.

    connect_s     worker to rendezvous and worker to worker, retries included
    join_s        from joining until the world is complete
    suspect_s     silence after which a peer counts as lost, if the rendezvous cannot reach it either (a frozen one is noticed after about
                  1.5 times as long); and how long a collective waits before a warning says which ranks it waits for
    lost_s        silence after which a peer counts as lost in any case
    collective_s  default for one collective, from call to result
    drain_s       how long closing waits for peers to say goodbye, once they no longer take what was sent to them

    Raises UsageError for values that make no sense.
    """

    connect_s: float = 30.0
    join_s: float = 600.0
    suspect_s: float = 2.0
    lost_s: float = 10.0
    collective_s: float = 60.0
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        _positive(
            self,
            connect_s=self.connect_s,
            join_s=self.join_s,
            suspect_s=self.suspect_s,
            lost_s=self.lost_s,
            collective_s=self.collective_s,
            drain_s=self.drain_s,
        )

    @classmethod
    def parse(cls, text: str) -> "Timeouts":
        """Read the value of a variable, such as "collective_s=300,join_s=60"; others keep their defaults. Raises UsageError."""
        given: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (each.strip() for each in part.partition("="))
            if name not in cls.__dataclass_fields__:
                raise UsageError(
                    f"{part!r} does not set a known timeout; write {', '.join(f'{known}=SECONDS' for known in cls.__dataclass_fields__)}"
                )
            try:
                given[name] = float(value)
            except ValueError:
                raise UsageError(f"{part!r} must be a number of seconds, as in {name}={getattr(cls(), name):g}") from None
        return cls(**given)

    @classmethod
    def for_tests(cls) -> "Timeouts":
        """Short enough that a hang fails a test with our error rather than the runner's."""
        return cls(connect_s=10.0, join_s=20.0, suspect_s=2.0, lost_s=4.0, collective_s=15.0, drain_s=1.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes that bound memory and messages; the same on all ranks of a cluster.

    chunk_bytes        payload of one message (benchmarks/README.md)
    eager_bytes        how much of a collective is sent to a peer without waiting for it: all of a small one, and the beginning of a large
                       one if the peer is on another node
    max_message_bytes  gRPC refuses a received message above this before it is allocated
    window_bytes       memory in which a rank's data waits for the other ranks of its node, if they share memory; data that they
                       can read from where it is does not need it
    inline_bytes       less than this goes over gRPC in any case, which is faster than copying and announcing it
    letter_bytes       a collective of ranks of one node in which no rank sends more than this, eager_bytes or chunk_bytes goes through
                       their mailboxes, in the threads that wait for it; for a larger one the mailboxes say where the data is; 0: no
                       collective uses mailboxes
    max_outstanding    collectives under way per group and rank; more wait their turn. With eager_bytes it
                       bounds what a peer that runs ahead can make this rank hold

    Raises UsageError for values that make no sense.
    """

    chunk_bytes: int = 2 * MIB
    eager_bytes: int = MIB
    max_message_bytes: int = 16 * MIB
    window_bytes: int = 16 * MIB
    inline_bytes: int = 32 * KIB
    letter_bytes: int = MIB
    max_outstanding: int = 32

    def __post_init__(self) -> None:
        _positive(self, chunk_bytes=self.chunk_bytes, max_message_bytes=self.max_message_bytes, max_outstanding=self.max_outstanding)
        if self.eager_bytes < 0:
            raise UsageError(f"Limits.eager_bytes must not be negative, got {self.eager_bytes}")
        if self.inline_bytes < 0:
            raise UsageError(f"Limits.inline_bytes must not be negative, got {self.inline_bytes}")
        if self.letter_bytes < 0:
            raise UsageError(f"Limits.letter_bytes must not be negative, got {self.letter_bytes}")
        if self.window_bytes < 2 * self.chunk_bytes:  # a chunk is written while another one is read
            raise UsageError(f"Limits.window_bytes ({self.window_bytes}) must be at least twice chunk_bytes ({self.chunk_bytes})")
        if self.chunk_bytes % 8:
            raise UsageError(f"Limits.chunk_bytes must be a multiple of 8 (whole elements), got {self.chunk_bytes}")
        if self.chunk_bytes + 64 * KIB > self.max_message_bytes:
            raise UsageError(
                f"Limits.max_message_bytes ({self.max_message_bytes}) must exceed chunk_bytes ({self.chunk_bytes}) by at least 64 KiB"
            )

    @property
    def piece_bytes(self) -> int:
        """The bytes that one message stands for between ranks of a node: a chunk, or more if the window holds several of that size."""
        most = min(self.window_bytes // _PIECES, self.max_message_bytes - 64 * KIB)
        return max(self.chunk_bytes, most - most % 8)

    @property
    def mailbox_bytes(self) -> int:
        """The size of a rank's mailbox, for letters that their readers have yet to read."""
        return _LETTERS * self.letter_bytes

    @property
    def direct_bytes(self) -> int:
        """The most that one eager message may carry: `eager_bytes`, or a chunk if that is smaller."""
        return min(self.eager_bytes, self.chunk_bytes)


class NodeEngine(StrEnum):
    """The engine that carries large data between the ranks of a node. It is the same for all ranks of a cluster."""

    SHARDNET = "shardnet"  # this package: shared memory and its own collectives
    NCCL = "nccl"  # NVIDIA's library, through torch: tensors on GPUs
    GLOO = "gloo"  # torch's engine for CPUs; stands in for NCCL where there is no GPU
