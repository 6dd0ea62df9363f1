"""`Mailbox`: what a rank writes for others of its node that look for it themselves.

[Note: mailboxes] Telling another process something over a socket costs two changes of threads on the other side, and those take longer
than moving 100 KiB. So what is small, and waited for, is left in memory instead: each rank writes its letters into its own mailbox,
which the others map read-only, and a thread that waits for one looks there itself.

A mailbox begins with a count of what has happened to it, which is the word that readers sleep on (futex.py). A directory says which
letters there are: an entry is a few words, of which `number` is written last and taken away first, and `serial`, which is never the same
again, written before the others: who finds both as they were when he has read the rest has seen one entry and all of it. The letters'
bytes lie in a ring. A reader acknowledges a letter in its own mailbox, by the letter's serial number, so all memory has one writer; a
letter that all of its readers have acknowledged is forgotten by its writer, who looks when it needs the room. One that is not read for long
(a rank may wait there for something that happens once an hour) stays where it is, and others are written around it.

A writer may also take a letter back. A reader that is reading it then finds the entry changed when it has read, and must not use it.
"""

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory import alarm, futex
from shardnet.transport.shared_memory.mapping import mapped
from shardnet.transport.shared_memory.memfd import allocate, found, keep_others_from_writing
from shardnet.wire import Buffer

NAME = "shardnet-mailbox"
RANKS = 64  # of a node: more have no mailboxes
_ENTRIES = 64
_PROBES = 8  # entries at which a letter may stand
_ALIGNMENT = 64  # of what lies in the ring: a cache line, and more than any element needs

# where things are, in words of 8 bytes
_COUNT = 0
_DIRECTORY = 8
_ENTRY_WORDS = 8
_GROUP, _NUMBER, _SERIAL, _START, _NOTE_BYTES, _DATA_BYTES = range(6)  # in an entry; the number is that of the collective, plus 1
_RECEIPTS = _DIRECTORY + _ENTRIES * _ENTRY_WORDS  # of this rank: by whose letters, and by entry
HEAD_BYTES = (_RECEIPTS + RANKS * _ENTRIES) * 8


_PLACES = [tuple((first + step) % _ENTRIES for step in range(_PROBES)) for first in range(_ENTRIES)]


def _entries(group: int, sequence: int) -> Sequence[int]:
    """Where a letter may stand in the directory."""
    return _PLACES[(group + sequence) % _ENTRIES]


@dataclass(slots=True)
class Letter:
    """A letter as its reader finds it. Its bytes may be used if `MailboxView.holds` it still when they have been read."""

    note: memoryview
    data: memoryview
    entry: int
    number: int
    serial: int


@dataclass(slots=True, eq=False)
class Posted:
    """A letter as its writer knows it."""

    group: int
    sequence: int
    entry: int
    serial: int
    start: int  # in the ring, from the first byte ever written; a round more whenever others were written around it
    end: int
    data: int  # where its data begins in the ring
    readers: Sequence["MailboxView"]
    free: bool = False  # all readers have acknowledged it, or it was taken back


class Mailbox:
    """A rank's own. Safe to use from any thread."""

    def __init__(self, place: int, capacity: int) -> None:
        """place     this rank's among those of its node
        capacity  bytes of letters

        Raises OSError if there is no memory, or no way to wait for a letter.
        """
        if not (futex.available and alarm.available) or place >= RANKS:
            raise OSError(f"mailboxes need Linux on x86-64, and no more than {RANKS} ranks a node")
        self.capacity = capacity + -capacity % _ALIGNMENT
        self.place = place
        self._descriptor = allocate(NAME, HEAD_BYTES + self.capacity)
        try:
            memory, self._address = mapped(self._descriptor, HEAD_BYTES + self.capacity, mmap.MAP_SHARED)
            keep_others_from_writing(self._descriptor)
        except BaseException:
            self.hide()
            raise
        self._words = memory[:HEAD_BYTES].data.cast("Q")
        self._ring = memory[HEAD_BYTES:]
        self._lock = threading.Lock()
        self._serials = count(1)
        self._head = 0
        self._posted: deque[Posted] = deque()  # in the order of the ring
        self._at: dict[int, Posted] = {}  # by entry, the last one there

    def offer(self) -> mesh_pb2.MailboxOffer:
        """Where a reader finds it, until `hide`."""
        return mesh_pb2.MailboxOffer(descriptor=self._descriptor, capacity=self.capacity, place=self.place)

    def hide(self) -> None:
        """Every reader has found it, or never will."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def post(self, group: int, sequence: int, note: bytes, data: Buffer, readers: Sequence["MailboxView"]) -> Posted | None:
        """Leave a letter for these; None if there is no room for it now."""
        noted = len(note) + -len(note) % _ALIGNMENT
        with self._lock:
            entry = self._entry(group, sequence)
            start = None if entry is None else self._make_room(noted + len(data))
            if entry is None or start is None:
                return None
            at = start % self.capacity
            posted = Posted(group, sequence, entry, next(self._serials), start, start + noted + len(data), at + noted, readers)
            self._at[entry] = posted
            self._posted.append(posted)
            self._head = posted.end
            self._ring.data[at : at + len(note)] = note
            np.copyto(self._ring[posted.data : posted.data + len(data)], np.frombuffer(data, np.uint8))  # lets other threads run
            words, base = self._words, _DIRECTORY + entry * _ENTRY_WORDS
            words[base + _NUMBER] = 0
            words[base + _SERIAL] = posted.serial
            words[base + _GROUP] = group
            words[base + _START] = at
            words[base + _NOTE_BYTES] = len(note)
            words[base + _DATA_BYTES] = len(data)
            words[base + _NUMBER] = sequence + 1
            self._ring_bell()
        return posted

    def mark(self, posted: Posted, word: int) -> None:
        """Write the first 8 bytes of a letter's data anew, for readers that have more to wait for than the letter."""
        with self._lock:
            if not posted.free:  # or the ring may have something else there
                self._ring[posted.data : posted.data + 8].view(np.uint64)[0] = word
                self._ring_bell()

    def withdraw(self, group: int, sequence: int | None = None) -> None:
        """Take a letter back, or all of a group, if it is still there: who has not read it never will."""
        with self._lock:
            for posted in self._posted:
                if posted.group == group and sequence in (None, posted.sequence) and not posted.free:
                    posted.free = True
                    self._words[_DIRECTORY + posted.entry * _ENTRY_WORDS + _NUMBER] = 0
                    self._ring_bell()

    def acknowledge(self, letters: Iterable[tuple["MailboxView", Letter]], *, aloud: bool = False) -> None:
        """This rank needs these letters no more. One that was taken back may be acknowledged after the next one in its entry.

        aloud  their writers wait for that
        """
        with self._lock:
            for view, letter in letters:
                place = _RECEIPTS + view.place * _ENTRIES + letter.entry
                self._words[place] = max(self._words[place], letter.serial)
            if aloud:
                self._ring_bell()

    def _ring_bell(self) -> None:
        self._words[_COUNT] = (self._words[_COUNT] + 1) % (1 << 32)
        futex.wake(self._address)

    def _next_place(self, size: int) -> int:
        """The next position at which `size` bytes lie in one piece."""
        start = self._head + -self._head % _ALIGNMENT
        if start % self.capacity + size > self.capacity:
            start += -start % self.capacity
        return start

    def _entry(self, group: int, sequence: int) -> int | None:
        """An entry where this letter may stand, and none does."""
        for entry in _entries(group, sequence):
            posted = self._at.get(entry)
            if posted is None or self._is_free(posted):
                return entry
        return None

    def _make_room(self, size: int) -> int | None:
        """The next position at which so many bytes may be written; None if there is none."""
        if size > self.capacity:
            return None
        for _ in range(len(self._posted) + 1):
            start = self._next_place(size)
            if not self._posted or start + size - self._posted[0].start <= self.capacity:
                return start
            self._pass(self._posted.popleft())
        return None

    def _pass(self, oldest: Posted) -> None:
        """Forget the oldest letter if it is free, and else go around it."""
        if self._is_free(oldest):
            if self._at[oldest.entry] is oldest:  # a reader that was taken for dead may look for it again
                self._words[_DIRECTORY + oldest.entry * _ENTRY_WORDS + _NUMBER] = 0
        else:
            oldest.start += self.capacity
            oldest.end += self.capacity
            self._posted.append(oldest)
            self._head = oldest.end

    def _is_free(self, posted: Posted) -> bool:
        if not posted.free:
            posted.free = all(view.gone or view.has_acknowledged(self.place, posted) for view in posted.readers)
        return posted.free


class MailboxView:
    """Another rank's mailbox, to be read. Safe to use from any thread."""

    def __init__(self, process: int, offer: mesh_pb2.MailboxOffer) -> None:
        """Raises OSError, saying why, if it is not in this machine's memory or not ours to see."""
        size = HEAD_BYTES + offer.capacity
        if not futex.available or not offer.capacity or offer.place >= RANKS:
            raise OSError("it has no mailbox that this rank could read")
        with found(NAME, process, offer.descriptor, size) as descriptor:
            memory, self.address = mapped(descriptor, size, mmap.MAP_SHARED, write=False)
        self.place = offer.place
        self.gone = False  # its owner reads nothing any more
        self._words = memory[:HEAD_BYTES].data.cast("Q")
        self._ring = memory[HEAD_BYTES:].data

    @property
    def count(self) -> int:
        """Another one after every letter, mark and receipt that is given aloud, and whenever a letter is taken back."""
        return self._words[_COUNT]

    def find(self, group: int, sequence: int) -> Letter | None:
        """The letter for a collective of a group, if it is there. Raises ProtocolError if its entry makes no sense."""
        words, number = self._words, sequence + 1
        for entry in _entries(group, sequence):
            base = _DIRECTORY + entry * _ENTRY_WORDS
            serial = words[base + _SERIAL]
            if words[base + _NUMBER] == number and words[base + _GROUP] == group:
                at, note_bytes, data_bytes = words[base + _START], words[base + _NOTE_BYTES], words[base + _DATA_BYTES]
                if words[base + _NUMBER] != number or words[base + _SERIAL] != serial:  # another one, or none, since it was looked at
                    return None
                data = at + note_bytes + -note_bytes % _ALIGNMENT
                if data + data_bytes > len(self._ring):
                    raise ProtocolError(f"a letter of {data_bytes} bytes at {data} in a mailbox of {len(self._ring)} bytes")
                return Letter(self._ring[at : at + note_bytes], self._ring[data : data + data_bytes], entry, number, serial)
        return None

    def holds(self, letter: Letter) -> bool:
        """Whether what has been read of it up to now was the letter."""
        base = _DIRECTORY + letter.entry * _ENTRY_WORDS
        return self._words[base + _NUMBER] == letter.number and self._words[base + _SERIAL] == letter.serial

    def has_acknowledged(self, place: int, posted: Posted) -> bool:
        """Whether its owner needs this letter of the rank with that place no more."""
        return self._words[_RECEIPTS + place * _ENTRIES + posted.entry] >= posted.serial

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until `count` is not `seen` any more, or for some time, or less."""
        futex.wait(self.address, seen, timeout_s)

    def wake(self) -> None:
        """Let all that sleep here look around, whichever process they are of."""
        futex.wake(self.address)
