"""Every error that shardnet raises.

ShardnetError
├── UsageError (ValueError)        the call itself is wrong; nothing was sent, unless a send and its recv differ in size
│   ├── InvalidWorldSizeError
│   ├── InvalidRankError
│   ├── SelfSendError
│   ├── SizeMismatchError
│   ├── DtypeError
│   ├── AddressError               not host:port
│   ├── PlaintextRefused           unprotected traffic off this machine
│   ├── CredentialsError           certificates or a join token that cannot be used
│   └── StateError (RuntimeError)  right call, wrong moment
├── CollectiveError (RuntimeError) a collective failed; the process goes on
│   ├── CollectiveMismatch         ranks disagree about which collective it is
│   ├── CollectiveTimeout          (TimeoutError) ranks did not arrive in time
│   └── PeerLost                   (ConnectionError) a rank died, froze or left
├── ListenError (OSError)          this process cannot listen on that address
├── EndpointUnavailable (ConnectionError)  nobody answers at that address
├── HandshakeError (ConnectionError)  one end would not trust the other
├── ProtocolError                  a peer sent what no shardnet worker sends
├── ClosedError (RuntimeError)     the backend or cluster is closed
│   └── InheritedError             this process was forked from the rank that has it
├── StateLost                      more workers are gone than there were copies of their state
├── CheckpointError                a checkpoint cannot be written, or no existing one can be read
│   └── EndNotSaved                the training is over, and only its last checkpoint failed
├── Preempted                      a worker was told to leave, and the job cannot go on without it
├── WorldChanges                   not a failure: the epoch ends here, and `shardnet.elastic` goes on with the next one
└── RendezvousError                joining failed
    ├── RendezvousUnavailable      (ConnectionError) nobody answers at the address
    ├── JoinTimeout                (TimeoutError) too few workers came in time
    └── JoinRefused                full, duplicate, other version, other world size
"""

from collections.abc import Iterator, Sequence
from typing import Any


class ShardnetError(Exception):
    """Base of everything that shardnet raises on purpose. It can be pickled, because Ray passes errors from process to process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[ShardnetError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ShardnetError:
    """Rebuild an error from another process; its class's constructor may take arguments other than `args`."""
    base = OSError if issubclass(kind, OSError) else Exception  # `kind.__new__` may be that of another base, which Python refuses
    error = base.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(ShardnetError, ValueError):
    """The call is wrong. Raised before any traffic, except when a send and its recv differ in size, which only the two ranks together can
    tell."""


class InvalidWorldSizeError(UsageError):
    """A group of no ranks, or of a wrong number of ranks."""

    def __init__(self, detail: str = "world size must be at least 1, got 0") -> None:
        super().__init__(detail)


class InvalidRankError(UsageError):
    """A rank outside [0, world_size), or one that is no member of a sub-group, in which case `message` says so."""

    def __init__(self, rank: int, world_size: int, detail: str = "", *, message: str = "") -> None:
        super().__init__(message or f"rank {rank} is not in [0, {world_size})" + (f": {detail}" if detail else ""))
        self.rank = rank
        self.world_size = world_size


class SelfSendError(UsageError):
    """Send to, or receive from, oneself."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} cannot send to or receive from itself; copy the tensor instead")
        self.rank = rank


class SizeMismatchError(UsageError):
    """A buffer or a list does not have the size that the call needs, or a send and its recv differ in size, in which case `message` says
    so."""

    def __init__(self, expected: object, got: object, what: str = "elements", *, message: str = "") -> None:
        super().__init__(message or f"expected {expected} {what} but got {got}")
        self.expected = expected
        self.got = got


class DtypeError(UsageError):
    """The operation is not defined for this dtype."""


class AddressError(UsageError):
    """A text that should be `host:port` is not."""


class PlaintextRefused(UsageError):
    """Unencrypted traffic would leave this machine without permission. `problem` is the message up to the part on how to allow it."""

    def __init__(self, problem: str, allowed_by: str = "insecure=True (--insecure)") -> None:
        super().__init__(f"{problem}, or allow it with {allowed_by} on a network that you trust")
        self.problem = problem


class CredentialsError(UsageError):
    """Certificates or a join token that cannot be used: missing, damaged, expired, or for something else."""


class StateError(UsageError, RuntimeError):
    """The call is right but comes at the wrong moment."""


class CollectiveError(ShardnetError, RuntimeError):
    """A collective failed on this rank. Sequence numbers keep the next one unaffected.

    Like the errors of torch's own backends it is a RuntimeError: code for torch.distributed that catches those catches it, too.
    """


class CollectiveMismatch(CollectiveError):
    """Ranks disagree on op, order, dtype, size, root or reduction; names both sides."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective did not end in time. `missing` are the ranks that had not entered it (empty: all had)."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PeerLost(CollectiveError, ConnectionError):
    """A rank died, froze, was cut off or left. `rank` is its global rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ListenError(ShardnetError, OSError):
    """The address is taken, or is not one of this machine's."""


class EndpointUnavailable(ShardnetError, ConnectionError):
    """No shardnet process answered at an address in time."""


class HandshakeError(ShardnetError, ConnectionError):
    """A connection was refused before anything was asked: one end has no certificate that the other trusts, or no TLS at all."""


class ProtocolError(ShardnetError):
    """Bytes arrived that no worker of this version sends: they were damaged in transit, or a stranger sent them."""


class ClosedError(ShardnetError, RuntimeError):
    """The backend or cluster was closed before or during the call. A RuntimeError for the same reason as `CollectiveError`."""


class InheritedError(ClosedError):
    """A forked child has used an object that belongs to the rank that it was forked from."""

    def __init__(self, where: str = "") -> None:
        text = (
            "this process was forked from a rank and has no part in the cluster: call collectives and sharded models in the process "
            'that has joined; to make a process that joins, too, use the start method "spawn"'
        )
        super().__init__(f"{where} {text}" if where else text)


class StateLost(ShardnetError):
    """The state of some step cannot be put together any more: workers are gone, and so are the copies that others held of their state."""


class CheckpointError(ShardnetError):
    """A checkpoint could not be written, or its files do not hold what was written. Says which file, and on which rank."""


class EndNotSaved(CheckpointError):
    """A training is over on all ranks, but its last checkpoint could not be written. Says which one is there, and what to do. A new worker
    would be no help: it would do again what is done, and could not save that either."""


class Preempted(ShardnetError):
    """Another worker was told to leave (SIGTERM), and the job, which is not elastic, cannot go on without it. Says what is saved."""


class WorldChanges(ShardnetError):
    """All ranks have committed a step and agreed to take in workers that wait, or to go on without workers that leave. Do not catch it: it
    must reach `shardnet.elastic.run`.

    leaving  the ranks that leave
    """

    def __init__(self, message: str, leaving: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.leaving = tuple(leaving)


class RendezvousError(ShardnetError):
    """Joining the cluster failed."""


class RendezvousUnavailable(RendezvousError, ConnectionError):
    """Nobody answered at the rendezvous address within the connect timeout."""


class JoinTimeout(RendezvousError, TimeoutError):
    """Too few workers joined in time."""


class JoinRefused(RendezvousError):
    """The rendezvous said no: job full or running, duplicate worker, other protocol version, other world size.

    `reason` is the same in one word, for programs (shardnet/rendezvous/refusal.py lists them).
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its causes and contexts, and the errors in its group."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
