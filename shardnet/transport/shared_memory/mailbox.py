"""`Mailbox`: letters that a rank writes for others of its node, which look for them themselves.

[Note: mailboxes] A message over a socket costs two thread switches in the receiving process, and those take longer than moving 100 KiB.
So a small message for which somebody waits is left in memory instead (MPI calls this an eager protocol): each rank writes its letters
into its own mailbox, which the others map read-only, and a thread that waits for a letter looks there itself.

A mailbox begins with a count of the events in it, which is the word that readers sleep on (futex.py). A directory says which letters
there are. An entry is a few words. The writer clears `number` first and writes it last; before the other words it writes `serial`, which
is never the same again. So a reader that finds both unchanged after it has read the rest has seen one whole entry (a seqlock works in
this way). The letters' bytes lie in a ring. A reader acknowledges a letter in its own mailbox, by the letter's serial number, so each
mailbox has a single writer. The writer forgets a letter that all of its readers have acknowledged; it checks this when it needs room.
A letter that stays unread for long (a rank may wait for something that happens once an hour) stays where it is, and the writer writes
others around it.

A writer may also take a letter back. A reader that is reading it at that moment finds the entry changed afterwards, and must not use the
letter.
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
RANKS = 64  # of a node: further ranks have no mailboxes
_ENTRIES = 64
_PROBES = 8  # entries in which a letter may stand
_ALIGNMENT = 64  # of notes and data in the ring: a cache line, and more than any element needs

# where things are, in words of 8 bytes
_COUNT = 0
_DIRECTORY = 8
_ENTRY_WORDS = 8
_GROUP, _NUMBER, _SERIAL, _START, _NOTE_BYTES, _DATA_BYTES = range(6)  # in an entry; the number is that of the collective, plus 1
_RECEIPTS = _DIRECTORY + _ENTRIES * _ENTRY_WORDS  # what this rank has acknowledged: by the place of the letter's writer, and by entry
HEAD_BYTES = (_RECEIPTS + RANKS * _ENTRIES) * 8


_PLACES = [tuple((first + step) % _ENTRIES for step in range(_PROBES)) for first in range(_ENTRIES)]


def _entries(group: int, sequence: int) -> Sequence[int]:
    """Where a letter may stand in the directory."""
    return _PLACES[(group + sequence) % _ENTRIES]


@dataclass(slots=True)
class Letter:
    """A letter as its reader finds it. The reader may use what it has read of it only if `MailboxView.holds` is still true afterwards."""

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
    start: int  # in the ring, from the first byte ever written; grows by the capacity whenever others were written around it
    end: int
    data: int  # where its data begins in the ring
    readers: Sequence["MailboxView"]
    free: bool = False  # all readers have acknowledged it, or it was taken back


class Mailbox:
    """A rank's own. Safe to use from any thread."""

    def __init__(self, place: int, capacity: int) -> None:
        """place     this rank's number among the ranks of its node
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
        self._at: dict[int, Posted] = {}  # the last letter in each entry

    def offer(self) -> mesh_pb2.MailboxOffer:
        """Tell where a reader finds the mailbox, until `hide`."""
        return mesh_pb2.MailboxOffer(descriptor=self._descriptor, capacity=self.capacity, place=self.place)

    def hide(self) -> None:
        """Close the descriptor: every reader has found it, or never will."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def post(self, group: int, sequence: int, note: bytes, data: Buffer, readers: Sequence["MailboxView"]) -> Posted | None:
        """Leave a letter for these readers; None if there is no room for it now."""
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
        """Overwrite the first 8 bytes of a letter's data, for readers that have more to wait for than the letter."""
        with self._lock:
            if not posted.free:  # otherwise the ring may hold something else there
                self._ring[posted.data : posted.data + 8].view(np.uint64)[0] = word
                self._ring_bell()

    def withdraw(self, group: int, sequence: int | None = None) -> None:
        """Take a letter back, or all of a group, if it is still there: a reader that has not read it never will."""
        with self._lock:
            for posted in self._posted:
                if posted.group == group and sequence in (None, posted.sequence) and not posted.free:
                    posted.free = True
                    self._words[_DIRECTORY + posted.entry * _ENTRY_WORDS + _NUMBER] = 0
                    self._ring_bell()

    def acknowledge(self, letters: Iterable[tuple["MailboxView", Letter]], *, aloud: bool = False) -> None:
        """Say that this rank no longer needs these letters. One that was taken back may be acknowledged after the next one in its entry.

        aloud  their writers wait for the acknowledgement
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
        """The next position at which `size` bytes fit without wrapping around the end of the ring."""
        start = self._head + -self._head % _ALIGNMENT
        if start % self.capacity + size > self.capacity:
            start += -start % self.capacity
        return start

    def _entry(self, group: int, sequence: int) -> int | None:
        """A free entry in which this letter may stand."""
        for entry in _entries(group, sequence):
            posted = self._at.get(entry)
            if posted is None or self._is_free(posted):
                return entry
        return None

    def _make_room(self, size: int) -> int | None:
        """The next position at which `size` bytes may be written; None if there is none."""
        if size > self.capacity:
            return None
        for _ in range(len(self._posted) + 1):
            start = self._next_place(size)
            if not self._posted or start + size - self._posted[0].start <= self.capacity:
                return start
            self._pass(self._posted.popleft())
        return None

    def _pass(self, oldest: Posted) -> None:
        """Forget the oldest letter if it is free; otherwise go around it."""
        if self._is_free(oldest):
            if self._at[oldest.entry] is oldest:  # clear the entry: a reader that was taken for dead may look for it again
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
        self.gone = False  # its owner no longer reads anything
        self._words = memory[:HEAD_BYTES].data.cast("Q")
        self._ring = memory[HEAD_BYTES:].data

    @property
    def count(self) -> int:
        """A number that changes with every letter, every mark and every acknowledgement `aloud`, and whenever a letter is taken back."""
        return self._words[_COUNT]

    def find(self, group: int, sequence: int) -> Letter | None:
        """The letter for a collective of a group, if it is there. Raises ProtocolError if its entry makes no sense."""
        words, number = self._words, sequence + 1
        for entry in _entries(group, sequence):
            base = _DIRECTORY + entry * _ENTRY_WORDS
            serial = words[base + _SERIAL]
            if words[base + _NUMBER] == number and words[base + _GROUP] == group:
                at, note_bytes, data_bytes = words[base + _START], words[base + _NOTE_BYTES], words[base + _DATA_BYTES]
                if words[base + _NUMBER] != number or words[base + _SERIAL] != serial:  # the entry has changed meanwhile
                    return None
                data = at + note_bytes + -note_bytes % _ALIGNMENT
                if data + data_bytes > len(self._ring):
                    raise ProtocolError(
                        f"a letter of {data_bytes} bytes at position {data} does not fit into a mailbox of {len(self._ring)} bytes"
                    )
                return Letter(self._ring[at : at + note_bytes], self._ring[data : data + data_bytes], entry, number, serial)
        return None

    def holds(self, letter: Letter) -> bool:
        """Whether everything read from the letter until now really was this letter: its entry has not changed."""
        base = _DIRECTORY + letter.entry * _ENTRY_WORDS
        return self._words[base + _NUMBER] == letter.number and self._words[base + _SERIAL] == letter.serial

    def has_acknowledged(self, place: int, posted: Posted) -> bool:
        """Whether the mailbox's owner no longer needs this letter of the rank at `place`."""
        return self._words[_RECEIPTS + place * _ENTRIES + posted.entry] >= posted.serial

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until `count` is no longer `seen`, at most `timeout_s`; may return early."""
        futex.wait(self.address, seen, timeout_s)

    def wake(self) -> None:
        """Wake all threads that sleep at this mailbox, in any process, so that they look again."""
        futex.wake(self.address)
