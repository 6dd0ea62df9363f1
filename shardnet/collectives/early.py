"""`Early`: chunks that came before this rank asked for them (MPI's "unexpected messages")."""

import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from shardnet.config import KIB, Limits
from shardnet.errors import ProtocolError
from shardnet.wire import Chunk

_CHUNK_BYTES = 8 * KIB  # added to the size of each chunk: few come early, and a flood of small ones is cut off before others notice it
_WORD_BYTES = KIB  # for messages about loans, of which one collective may have many, failures, and groups that were made


def _limit_bytes(limits: Limits) -> int:
    """The most bytes that are kept of one sender."""
    return limits.max_outstanding * (limits.eager_bytes + 64 * KIB)


def most_words(limits: Limits) -> int:
    """The most announcements without data that are kept of one sender."""
    return _limit_bytes(limits) // _CHUNK_BYTES


class Early:
    """Chunks by the collective or group that they are for. Of each sender it keeps no more than one has under way that follows [Note: the
    ledger], [Note: first contact] and [Note: turns]: otherwise a peer could send any amount to a rank that never asks for it.

    Of a collective that has failed elsewhere it keeps only the failure: a rank that enters that collective fails, too. If it kept the rest,
    ranks that go on without this one, in one such collective after the other, would reach the limit and be cut off.
    """

    def __init__(self, limits: Limits) -> None:
        self._limit_bytes = _limit_bytes(limits)
        self._chunks: dict[int, dict[int, list[tuple[int, Chunk]]]] = {}  # and by sequence number
        self._failed = set[tuple[int, int]]()  # the keys and numbers of those that have failed elsewhere
        self._held_bytes = Counter[int]()  # by sender

    def keep(self, key: int, source: int, chunk: Chunk) -> None:
        """Keep a chunk. Raises ProtocolError if that is too much of one sender."""
        if (key, chunk.sequence) in self._failed and _is_moot(chunk):
            return
        if self._held_bytes[source] + _size(chunk) > self._limit_bytes:
            raise ProtocolError(f"it sent more than {self._limit_bytes} bytes for collectives that this rank has not entered")
        if chunk.frame is None and chunk.lent is None:
            chunk.data = bytes(chunk.data)  # a view of the sender's buffer, which is lent for this call only
        chunk.came_ns = chunk.came_ns or time.monotonic_ns()  # it has the time if it was kept before, until its group was made
        kept = self._chunks.setdefault(key, {}).setdefault(chunk.sequence, [])
        if _says(chunk, "abort"):
            self._failed.add((key, chunk.sequence))
            self._release(each for each in kept if _is_moot(each[1]))
            kept[:] = [each for each in kept if not _is_moot(each[1])]
        kept.append((source, chunk))
        self._held_bytes[source] += _size(chunk)

    def take(self, key: int) -> list[tuple[int, Chunk]]:
        """Take out what came for a key, as (sender, chunk) pairs; it is not held any more."""
        by_number = self._chunks.pop(key, {})
        self._failed.difference_update((key, sequence) for sequence in by_number)
        taken = [*chain(*by_number.values())]
        self._release(taken)
        return taken

    def since(self, key: int) -> int | None:
        """When the first of the chunks kept for a key came, by time.monotonic_ns; None: there are none."""
        return next((chunk.came_ns for _, chunk in chain(*self._chunks.get(key, {}).values())), None)

    def __len__(self) -> int:
        """The number of keys for which something came."""
        return len(self._chunks)

    def __contains__(self, key: int) -> bool:
        return key in self._chunks

    def _release(self, chunks: Iterable[tuple[int, Chunk]]) -> None:
        for source, chunk in chunks:
            self._held_bytes[source] -= _size(chunk)


def _says(chunk: Chunk, word: str) -> bool:
    return chunk.control is not None and chunk.control.HasField(word)


def _is_moot(chunk: Chunk) -> bool:
    """Whether it means nothing for a collective that has failed."""
    return chunk.size > 0 or _says(chunk, "announcement")


def _size(chunk: Chunk) -> int:
    if chunk.lent is not None:
        return _WORD_BYTES
    if chunk.control is not None and (_says(chunk, "abort") or _says(chunk, "group_made")):
        return _WORD_BYTES + chunk.control.ByteSize()  # an error may be long
    return _CHUNK_BYTES + len(chunk.data if chunk.frame is None else chunk.frame)
