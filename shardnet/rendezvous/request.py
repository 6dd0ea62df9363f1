"""What a worker says about itself when it joins."""

from dataclasses import dataclass

from shardnet.address import Address
from shardnet.credentials import Identity
from shardnet.errors import JoinRefused, UsageError
from shardnet.rendezvous.refusal import Refusal
from shardnet.version import VERSION

PROTOCOL = 1  # raise it when an old worker and a new rendezvous, or the other way round, would misunderstand each other
MAX_TEXT = 256  # characters of a job id, incarnation or node: they are kept, logged and sent to every member
MAX_WORLD_SIZE = 2**16
MAX_EPOCH = 2**31  # half of what the wire's 32 bits hold


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """One worker's wish to join a job. Raises UsageError or AddressError at construction when it makes no sense.

    address          host:port where peers reach this worker, so neither port 0 nor 0.0.0.0
    node             identity of the host, equal for the workers of one host and for no others
    incarnation      new at every start of a worker
    min_world_size   the job may start with this many workers when no more come for a while
    max_world_size   the job starts at once with this many; equal for all workers of the job, like the minimum
    local_rank_hint  order among the workers of one node, as their launcher counted them
    wished_rank      the rank that the worker would like in a first epoch, None: any; see [Note: rank order] in placement.py
    elastic          the job goes on with fewer workers, at least its minimum, when some are lost, and takes in others up to its
                     maximum; equal for all workers of the job
    previous         the incarnation of the membership that this one follows, which ends with it; empty for a worker's first one
    last_epoch       the newest epoch that this worker was a member of; 0 for none
    missing          ranks of that epoch that nobody need wait for: they did not come to a collective in time, which ended the epoch, or
                     have agreed with the others that they leave
    replacement      this worker was started in place of a lost one: it must not start again a job that has ended
    resumes          this worker is still a member, but its connection to the rendezvous broke: nothing else changes
    identity         the identity that the worker's certificate has proved; the rendezvous fills it in; empty without TLS
    """

    job: str
    incarnation: str
    address: str
    node: str
    min_world_size: int
    max_world_size: int
    local_rank_hint: int = 0
    elastic: bool = False
    previous: str = ""
    last_epoch: int = 0
    missing: tuple[int, ...] = ()
    replacement: bool = False
    resumes: bool = False
    identity: str = ""
    wished_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("job", "incarnation", "node"):
            check_text(name, getattr(self, name))
        object.__setattr__(self, "address", _reachable(self.address))
        if not 1 <= self.min_world_size <= self.max_world_size <= MAX_WORLD_SIZE:
            raise UsageError(
                f"asked for {self.wish} workers; the world size needs 1 <= min_world_size <= max_world_size <= {MAX_WORLD_SIZE}"
            )
        if self.local_rank_hint < 0:
            raise UsageError(f"local_rank_hint must not be negative, got {self.local_rank_hint}")
        if self.wished_rank is not None and not 0 <= self.wished_rank < MAX_WORLD_SIZE:
            raise UsageError(f"wished_rank must be from 0 to {MAX_WORLD_SIZE - 1}, got {self.wished_rank}")
        if self.previous:
            check_text("previous", self.previous)
        if not 0 <= self.last_epoch <= MAX_EPOCH:
            raise UsageError(f"last_epoch must be from 0 to {MAX_EPOCH}, got {self.last_epoch}")
        if len(self.missing) > MAX_WORLD_SIZE:
            raise UsageError(f"missing names {len(self.missing)} ranks; at most {MAX_WORLD_SIZE} are allowed")

    @property
    def worker(self) -> tuple[str, int]:
        """Which worker this is, whichever start of it: its machine's certificate and its number there."""
        return self.identity, self.local_rank_hint

    @property
    def wish(self) -> str:
        """The world size asked for, as text for messages."""
        least, most = self.min_world_size, self.max_world_size
        return (str(most) if least == most else f"{least} to {most}") + (" elastic" if self.elastic else "")


def may_share_node(one: JoinRequest, other: JoinRequest) -> bool:
    """Whether two workers may be on one machine, and so may be told to share memory: if their certificates are the same, or say nothing
    about the machine."""
    if one.identity == other.identity:
        return True
    return all(each.identity and Identity.parse(each.identity).is_anonymous for each in (one, other))


def check_protocol(protocol: int, version: str) -> None:
    """Raise JoinRefused unless a worker with this `protocol` speaks ours; `version` is for the message. Comes before any other check."""
    if protocol != PROTOCOL:
        raise JoinRefused(
            f"the worker speaks protocol {protocol} (shardnet {version[:MAX_TEXT] or 'unknown'!r}) and this rendezvous protocol {PROTOCOL} "
            f"(shardnet {VERSION!r}); install the same version of shardnet on both",
            Refusal.PROTOCOL,
        )


def check_text(name: str, text: str) -> None:
    """Raise UsageError, which calls the text `name`, unless the text may appear in logs and in messages to all members."""
    if not text:
        raise UsageError(f"{name} must not be empty")
    if len(text) > MAX_TEXT:
        raise UsageError(f"{name} has {len(text)} characters; at most {MAX_TEXT} are allowed")
    if not text.isprintable():  # it goes into log lines
        raise UsageError(f"{name} {text!r} has characters that cannot be printed")


def _reachable(text: str) -> str:
    address = Address.parse(text)
    if address.port == 0 or address.is_unspecified:
        raise UsageError(f"peers cannot call {address}; join with the host and port at which they reach this worker")
    return str(address)
