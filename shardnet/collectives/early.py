"""`Early`: what came before this rank has asked for it."""

import time
from collections import Counter

from shardnet.config import KIB, Limits
from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.wire import Chunk

_CHUNK_BYTES = 8 * KIB  # that the smallest chunk counts for: few come early, and a flood of them is cut off before others notice it
_LOAN_BYTES = KIB  # for word of a loan, of which one collective may have many


def _limit_bytes(limits: Limits) -> int:
    """Of one sender."""
    return limits.max_outstanding * (limits.eager_bytes + 64 * KIB)


def most_words(limits: Limits) -> int:
    """How many chunks without data are kept of one sender."""
    return _limit_bytes(limits) // _CHUNK_BYTES


class Early:
    """Chunks by what they are for, a collective or a group; of each sender no more than one that keeps to [Note: the ledger], [Note: first
    contact] and [Note: turns] has under way: a rank that never asks would hold all that a peer likes otherwise."""

    def __init__(self, limits: Limits) -> None:
        self._limit_bytes = _limit_bytes(limits)
        self._chunks: dict[int, list[tuple[int, Chunk]]] = {}
        self._failed = set[int]()  # of which only words are kept
        self._held_bytes = Counter[int]()  # by sender

    def keep(self, key: int, source: int, chunk: Chunk) -> None:
        """Raises ProtocolError where it is too much."""
        if key in self._failed and chunk.size:
            if (word := _word(chunk)) is None:
                return
            chunk = word
        if self._held_bytes[source] + _size(chunk) > self._limit_bytes:
            raise ProtocolError(f"it sent more than {self._limit_bytes} bytes for collectives that this rank has not entered")
        if chunk.frame is None and chunk.lent is None:
            chunk.data = bytes(chunk.data)  # a view of the sender's buffer, which is lent for this call only
        self._held_bytes[source] += _size(chunk)
        chunk.came_ns = chunk.came_ns or time.monotonic_ns()  # kept before: for its group, which was not made yet
        self._chunks.setdefault(key, []).append((source, chunk))

    def take(self, key: int) -> list[tuple[int, Chunk]]:
        """What came for this, by sender; it is not held any more."""
        taken = self._chunks.pop(key, [])
        for source, chunk in taken:
            self._held_bytes[source] -= _size(chunk)
        self._failed.discard(key)
        return taken

    def forgo(self, key: int) -> None:
        """A collective has failed elsewhere: who enters it fails, too, and needs none of its data. Those who go on without this rank, in
        one after the other, would be cut off otherwise."""
        kept = self.take(key)
        self._failed.add(key)
        for source, chunk in kept:
            self.keep(key, source, chunk)

    def since(self, key: int) -> int | None:
        """When the first one for this came, by time.monotonic_ns; None: none has."""
        kept = self._chunks.get(key)
        return kept[0][1].came_ns if kept else None

    def __len__(self) -> int:
        """For how many something came."""
        return len(self._chunks)

    def __contains__(self, key: int) -> bool:
        return key in self._chunks


def _word(chunk: Chunk) -> Chunk | None:
    """What is left of a chunk without its data; None: nothing."""
    if chunk.control is None or not chunk.control.HasField("announcement"):
        return None
    signature = chunk.control.announcement.signature
    word = chunk.saying(mesh_pb2.Control(announcement=mesh_pb2.Announcement(signature=signature, posted=True)))  # else it were a letter
    word.came_ns = chunk.came_ns
    return word


def _size(chunk: Chunk) -> int:
    if chunk.lent is not None:
        return _LOAN_BYTES
    return _CHUNK_BYTES + len(chunk.data if chunk.frame is None else chunk.frame)
