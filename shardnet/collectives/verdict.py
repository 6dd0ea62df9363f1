"""The error that ends a collective when a rank is lost, and how an error that ends a collective on one rank reaches the others: as the
same kind of error, with the same ranks in it."""

from typing import TYPE_CHECKING

from shardnet.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost, ShardnetError, SizeMismatchError
from shardnet.pb.mesh_pb2 import Abort

if TYPE_CHECKING:
    from shardnet.collectives.switchboard import Switchboard


def peer_lost(board: "Switchboard", rank: int, name: str, reason: str = "") -> PeerLost:
    """The error of the collective `name`, which cannot end without that global rank. `reason` replaces the reason of the rank's loss."""
    cause, reason = board.cause(rank), reason or board.lost[rank]
    if cause != rank:
        reason = board.last_words(cause) or f"rank {rank} lost contact with it, and left"
    return PeerLost(f"{board.where()} rank {cause} ({board.mesh.address(cause)}) lost during {name}: {reason}", cause)


def pack(error: BaseException) -> Abort:
    """The message to the other ranks."""
    # text that is not valid in UTF-8 (a file name in the error of a caller's code) cannot be sent
    detail = str(error).encode(errors="replace").decode()
    match error:
        case CollectiveMismatch():
            return Abort(reason=Abort.MISMATCH, detail=detail)
        case CollectiveTimeout():
            return Abort(reason=Abort.TIMEOUT, detail=detail, ranks=error.missing)
        case PeerLost():
            return Abort(reason=Abort.LOST, detail=detail, ranks=[error.rank])
        case SizeMismatchError(expected=int(expected), got=int(sent)):
            return Abort(reason=Abort.SIZES, detail=detail, expected=expected, sent=sent)
        case _:
            return Abort(reason=Abort.FAILED, detail=detail)


def unpack(abort: Abort, where: str) -> ShardnetError:
    """The error for this rank; `where` says which rank aborted which collective."""
    text = f"{where}: {abort.detail}"
    match abort.reason:
        case Abort.MISMATCH:
            return CollectiveMismatch(text)
        case Abort.TIMEOUT:
            return CollectiveTimeout(text, abort.ranks)
        case Abort.LOST if abort.ranks:
            return PeerLost(text, abort.ranks[0])
        case Abort.SIZES:
            return SizeMismatchError(abort.expected, abort.sent, message=text)
        case _:
            return CollectiveError(text)
