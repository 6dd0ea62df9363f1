"""Every error that shardnet raises.

ShardnetError
├── UsageError (ValueError)        the call itself is wrong; nothing was sent, but where a send and its recv differ in size
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
│   ├── CollectiveMismatch         ranks disagree on what the collective is
│   ├── CollectiveTimeout          (TimeoutError) ranks did not arrive in time
│   └── PeerLost                   (ConnectionError) a rank died, froze or left
├── ListenError (OSError)          this process cannot listen on that address
├── EndpointUnavailable (ConnectionError)  nobody answers at that address
├── HandshakeError (ConnectionError)  one end would not trust the other
├── ProtocolError                  a peer sent what no shardnet worker sends
├── ClosedError (RuntimeError)     the backend or cluster is closed
│   └── InheritedError             this process was forked from the rank that has it
├── StateLost                      more workers are gone than there were copies of their state
├── CheckpointError                a checkpoint cannot be written, or none that is there can be read
├── Preempted                      a worker was told to leave, and the job cannot go on without it
├── WorldChanges                   no failure: the epoch ends here, for `shardnet.elastic` to go on with the next one
└── RendezvousError                joining failed
    ├── RendezvousUnavailable      (ConnectionError) nobody answers at the address
    ├── JoinTimeout                (TimeoutError) too few workers came in time
    ├── JoinRefused                full, duplicate, other version, other wish
    └── MembershipLost             this worker is no longer a member
"""

from collections.abc import Sequence
from typing import Any


class ShardnetError(Exception):
    """Base of everything that shardnet raises on purpose. It can be pickled: errors go from process to process under Ray."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[ShardnetError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ShardnetError:
    """An error from another process; its class may be made with other arguments than it has."""
    base = OSError if issubclass(kind, OSError) else Exception  # `kind.__new__` may be that of another base, which Python refuses
    error = base.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(ShardnetError, ValueError):
    """The call is wrong. Raised before any traffic, but where only the two ranks of a send and its recv together can tell that their
    sizes differ."""


class InvalidWorldSizeError(UsageError):
    """A group of no ranks, or of another number than is needed."""

    def __init__(self, detail: str = "world size must be at least 1, got 0") -> None:
        super().__init__(detail)


class InvalidRankError(UsageError):
    """A rank outside [0, world_size), or one that a sub-group lacks: `message` says so then."""

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
    """A buffer or a list has another size than the call needs, or a send than its recv: `message` says so then."""

    def __init__(self, expected: object, got: object, what: str = "elements", *, message: str = "") -> None:
        super().__init__(message or f"expected {expected} {what} but got {got}")
        self.expected = expected
        self.got = got


class DtypeError(UsageError):
    """The operation is not defined for this dtype."""


class AddressError(UsageError):
    """A text that should be `host:port` is not."""


class PlaintextRefused(UsageError):
    """Unencrypted traffic would leave this machine, and nobody said that it may. `problem` is the message up to how one says so."""

    def __init__(self, problem: str, allowed_by: str = "insecure=True (--insecure)") -> None:
        super().__init__(f"{problem}, or allow it with {allowed_by} on a network that you trust")
        self.problem = problem


class CredentialsError(UsageError):
    """Certificates or a join token that cannot be used: missing, damaged, expired, or for something else."""


class StateError(UsageError, RuntimeError):
    """The call is right but comes at the wrong moment."""


class CollectiveError(ShardnetError, RuntimeError):
    """A collective failed on this rank. Sequence numbers keep the next one unaffected.

    It is a RuntimeError as those of torch's own backends are: who catches these in code for torch.distributed catches it, too.
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
    """The address is taken, or is none of this machine's."""


class EndpointUnavailable(ShardnetError, ConnectionError):
    """No shardnet process answered at an address in time."""


class HandshakeError(ShardnetError, ConnectionError):
    """A connection was refused before anything was asked: one end has no certificate that the other trusts, or no TLS at all."""


class ProtocolError(ShardnetError):
    """Bytes arrived that no worker of this version sends: damaged in transit, or a stranger."""


class ClosedError(ShardnetError, RuntimeError):
    """The backend or cluster was closed before or during the call. A RuntimeError for the same reason as `CollectiveError`."""


class InheritedError(ClosedError):
    """A forked child has called what belongs to the rank that it was forked from."""

    def __init__(self, where: str = "") -> None:
        text = (
            "this process was forked from a rank and has no part in the cluster: call collectives and sharded models in the process "
            'that has joined; one that is to join, too, is made by "spawn"'
        )
        super().__init__(f"{where} {text}" if where else text)


class StateLost(ShardnetError):
    """The state of some step cannot be put together any more: workers are gone, and the copies that others held of theirs with them."""


class CheckpointError(ShardnetError):
    """A checkpoint could not be written, or what is in its files is not what was written. Says which file, and on which rank."""


class Preempted(ShardnetError):
    """Another worker was told to leave (SIGTERM), and the job, which is not elastic, cannot go on without it. Says what is saved."""


class WorldChanges(ShardnetError):
    """All ranks have committed a step and agreed to take in workers that wait, or to go on without some that leave. Let it through to
    `shardnet.elastic.run`."""


class RendezvousError(ShardnetError):
    """Joining the cluster failed."""


class RendezvousUnavailable(RendezvousError, ConnectionError):
    """Nobody answered at the rendezvous address within the connect timeout."""


class JoinTimeout(RendezvousError, TimeoutError):
    """Too few workers joined in time."""


class JoinRefused(RendezvousError):
    """The rendezvous said no: job full or running, duplicate worker, other protocol, contradicting wish.

    `reason` is the same in one word, for programs (shardnet/rendezvous/refusal.py lists them).
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MembershipLost(RendezvousError):
    """The rendezvous no longer counts this worker as a member."""
