"""Letters in memory: which ranks find them, when their room is used again, and what a reader sees of a letter that was taken back."""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory import Bell, Mailbox, MailboxView, futex, mailbox
from shardnet.transport.shared_memory.mapping import mapped

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")

CAPACITY = 1024
GROUP = 2**64 - 3
NOTE = b"barrier()"


class Three:
    """A writer, which has place 0, and two readers with mailboxes of their own."""

    def __init__(self) -> None:
        self.writer = Mailbox(0, CAPACITY)
        self.view = MailboxView(os.getpid(), self.writer.offer())
        self.readers = [Mailbox(place, CAPACITY) for place in (1, 2)]
        self.views = [MailboxView(os.getpid(), reader.offer()) for reader in self.readers]

    def post(self, sequence: int, data: bytes = b"", *, group: int = GROUP) -> mailbox.Posted | None:
        return self.writer.post(group, sequence, NOTE, data, self.views)

    def read(self, sequence: int, *, group: int = GROUP) -> bytes | None:
        letter = self.view.find(group, sequence)
        return None if letter is None else bytes(letter.data)

    def acknowledge(self, sequence: int, *places: int) -> None:
        letter = self.view.find(GROUP, sequence)
        assert letter is not None
        for place in places:
            self.readers[place - 1].acknowledge([(self.view, letter)])


@pytest.fixture
def three() -> Iterator[Three]:
    made = Three()
    yield made
    for each in (made.writer, *made.readers):
        each.hide()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, CAPACITY - 64])
def test_a_letter_is_found_by_group_and_number(three: Three, size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert three.post(5, data) is not None
    letter = three.view.find(GROUP, 5)
    assert letter is not None
    assert (bytes(letter.note), bytes(letter.data)) == (NOTE, data)
    assert three.view.holds(letter)
    assert three.read(4) is None
    assert three.read(5 + 64) is None
    assert three.read(5, group=GROUP - 64) is None  # which has the same place in the directory


def test_all_of_it_can_be_used_and_no_more(three: Three) -> None:
    assert three.post(0, bytes(CAPACITY)) is None  # with its note
    assert all(three.post(number, bytes([number]) * (CAPACITY // 4 - 64)) for number in range(4))
    assert three.post(4) is None
    assert [three.read(number) for number in range(4)] == [bytes([number]) * (CAPACITY // 4 - 64) for number in range(4)]


def test_there_is_room_again_when_every_reader_has_acknowledged(three: Three) -> None:
    assert three.post(0, bytes(600))
    assert three.post(1, bytes(600)) is None
    three.acknowledge(0, 1)
    assert three.post(1, bytes(600)) is None
    three.acknowledge(0, 2)
    assert three.post(1, b"x" * 600)
    assert three.read(1) == b"x" * 600


def test_one_that_is_not_read_does_not_keep_others_out(three: Three) -> None:
    """It stays where it is, anywhere in the ring, and other letters are written around it."""
    rng = random.Random(2)
    for first in range(1, 9):
        number = first * 1_000
        assert three.post(number, b"stays" * 20)
        for each in range(number + 1, number + 40):
            data = rng.randbytes(rng.randrange(300))
            assert three.post(each, data)
            assert three.read(each) == data
            three.acknowledge(each, 1, 2)
            assert three.read(number) == b"stays" * 20
        three.acknowledge(number, 1, 2)
        assert three.post(number + 40, bytes(64 * first))
        three.acknowledge(number + 40, 1, 2)


def test_what_is_not_read_may_fill_it(three: Three) -> None:
    """Then there is room only between the letters and after them."""
    texts = {number: bytes([number]) * 150 for number in range(3)}
    assert all(three.post(number, text) for number, text in texts.items())
    assert not any(three.post(number, bytes(200)) for number in range(3, 20))
    texts[20] = b"behind"
    assert three.post(20, texts[20])
    three.acknowledge(1, 1, 2)
    texts[21] = b"between" * 20
    assert three.post(21, texts[21])
    assert three.post(22, b"no more" * 10) is None
    del texts[1]
    assert {number: three.read(number) for number in texts} == texts


def test_letters_are_acknowledged_in_any_order(three: Three) -> None:
    for number in range(3):
        assert three.post(number, bytes(200))
    for number in (2, 1):
        three.acknowledge(number, 1, 2)
    assert three.post(3, bytes(700)) is None  # the oldest one lies in the way
    three.acknowledge(0, 1, 2)
    assert three.post(3, bytes(700))


def test_as_many_letters_stand_at_a_place_of_the_directory_as_it_has_entries(three: Three) -> None:
    sequences = [number * 64 for number in range(9)]
    posted = [three.post(sequence) for sequence in sequences]
    assert [each is not None for each in posted] == [True] * 8 + [False]
    assert [three.read(sequence) for sequence in sequences] == [b""] * 8 + [None]
    three.acknowledge(sequences[3], 1, 2)
    assert three.post(sequences[8])
    assert three.read(sequences[8]) == b""
    assert three.read(sequences[3]) is None


def test_one_that_is_taken_back_is_seen_to_be(three: Three) -> None:
    posted = three.post(0, bytes(600))
    letter = three.view.find(GROUP, 0)
    assert posted is not None
    assert letter is not None
    before = three.view.count
    three.writer.withdraw(GROUP, 0)
    assert not three.view.holds(letter)
    assert three.read(0) is None
    assert three.view.count != before  # a sleeping reader is woken
    assert three.post(1, bytes(600))  # nobody has acknowledged the other one
    three.writer.withdraw(GROUP, 0)  # again: changes nothing
    assert three.read(1) == bytes(600)


def test_a_reader_that_is_gone_is_not_waited_for_and_sees_that_its_letter_is_not_there(three: Three) -> None:
    """The reader may be frozen rather than dead, and read on later."""
    assert three.post(0, bytes(600))
    letter = three.view.find(GROUP, 0)
    assert letter is not None
    three.acknowledge(0, 1)
    three.views[1].gone = True
    assert three.post(1, b"x" * 600)
    assert not three.view.holds(letter)
    assert three.read(0) is None


def test_a_letter_in_the_same_entry_is_another_one(three: Three) -> None:
    assert three.post(0)
    first = three.view.find(GROUP, 0)
    assert first is not None
    three.acknowledge(0, 1, 2)
    assert three.post(0, group=GROUP - 64)
    assert not three.view.holds(first)
    assert three.read(0) is None


def test_any_letters(three: Three) -> None:
    """Readers find what was written, and letters without acknowledgement stay, however full the ring and the directory are."""
    rng = random.Random(1)
    there: dict[int, tuple[bytes, set[int]]] = {}
    refused = 0
    for number in range(5_000):
        if rng.random() < 0.6:
            data = rng.randbytes(rng.choice((0, 1, 64, 100, 300)))
            if three.post(number, data):
                there[number] = data, {1, 2}
            else:
                refused += 1
        elif there:
            chosen = rng.choice(list(there))
            place = rng.choice(list(there[chosen][1]))
            three.acknowledge(chosen, place)
            there[chosen][1].discard(place)
            if not there[chosen][1]:
                del there[chosen]
        for sequence, (data, _) in there.items():
            assert three.read(sequence) == data
    assert 100 < refused < 2_500


def test_who_waits_is_woken_by_a_letter(three: Three) -> None:
    woken_s: list[float] = []

    def wait() -> None:
        while three.read(0) is None:
            seen = three.view.count
            if three.read(0) is None:
                three.view.wait(seen, 10.0)
        woken_s.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    three.post(0)
    thread.join(10.0)
    assert woken_s


def test_waiting_ends_by_itself_by_a_wake_and_at_once_if_something_has_changed(three: Three) -> None:
    three.view.wait(three.view.count, 0.001)
    three.view.wait(three.view.count + 1, 30.0)
    thread = threading.Thread(target=three.view.wait, args=(three.view.count, 30.0))
    thread.start()
    while thread.is_alive():
        three.view.wake()
        thread.join(0.001)


@pytest.mark.skipif(futex.most < 4, reason="waiting at several mailboxes at once needs Linux 5.16")
def test_waiting_at_several_ends_by_itself_by_any_of_them_and_at_once_if_one_has_changed(three: Three) -> None:
    views = [three.view, *three.views]

    bell = Bell()

    def wait(timeout_s: float, changed: MailboxView | Bell | None = None) -> None:
        bell.wait(bell.count + (bell is changed), {view: view.count + (view is changed) for view in views}, timeout_s)

    start = time.monotonic()
    wait(0.02)
    assert time.monotonic() - start >= 0.02
    callers: list[tuple[MailboxView | Bell, Callable[[], None]]] = [(bell, bell.ring), *((view, view.wake) for view in views)]
    for each, call in callers:
        wait(30.0, changed=each)
        thread = threading.Thread(target=wait, args=(30.0,))
        thread.start()
        while thread.is_alive():
            call()
            thread.join(0.001)


def test_a_bell_that_rang_before_somebody_waits_is_heard() -> None:
    bell = Bell()
    heard = bell.count
    bell.ring()
    bell.wait(heard, {}, 30.0)


def test_a_system_on_which_one_can_wait_at_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_WAITV", 100_000)  # no number of a system call
    assert futex._find_most() == 1


def test_readers_cannot_write(three: Three) -> None:
    with pytest.raises(TypeError, match="read-only"):
        three.view._words[0] = 1
    with pytest.raises(PermissionError):
        mapped(three.writer.offer().descriptor, mailbox.HEAD_BYTES, mmap.MAP_SHARED)


def test_a_mailbox_that_is_none() -> None:
    with pytest.raises(OSError, match="no mailbox"):
        MailboxView(os.getpid(), mesh_pb2.MailboxOffer())
    with pytest.raises(OSError, match="64 ranks"):
        Mailbox(64, CAPACITY)
    made = Mailbox(0, CAPACITY)
    offer = made.offer()
    with pytest.raises(OSError, match="not what was offered"):
        MailboxView(os.getpid(), mesh_pb2.MailboxOffer(descriptor=offer.descriptor, capacity=2 * CAPACITY))
    made.hide()
    with pytest.raises(OSError, match="cannot be seen"):
        MailboxView(os.getpid(), offer)


def test_an_entry_that_makes_no_sense(three: Three) -> None:
    assert three.post(0)
    entry = mailbox._DIRECTORY + mailbox._entries(GROUP, 0)[0] * mailbox._ENTRY_WORDS
    three.writer._words[entry + mailbox._DATA_BYTES] = 2**63
    with pytest.raises(ProtocolError, match="a letter of 9223372036854775808 bytes"):
        three.view.find(GROUP, 0)


def test_a_receipt_that_comes_late_does_not_take_back_the_next_one(three: Three) -> None:
    """The receipt is for a letter that was taken back: another letter has its entry now."""
    posted = three.post(0)
    first = three.view.find(GROUP, 0)
    assert posted is not None
    assert first is not None
    three.writer.withdraw(GROUP, 0)
    second = three.post(64)
    assert second is not None
    assert second.entry == first.entry
    three.acknowledge(64, 1, 2)
    three.readers[0].acknowledge([(three.view, first)])
    assert three.writer._is_free(second)


def test_an_entry_that_changes_while_it_is_read(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """One letter follows another in its entry, with the same number but in another group, and its words are written between the reader's
    reads: the reader finds the new letter or none."""
    found = 0
    for seed in range(500):
        group, other = GROUP - 64 * (2 * seed + 1), GROUP - 64 * (2 * seed + 2)
        rng, words = random.Random(seed), three.writer._words
        assert three.post(0, b"other", group=other)
        letter = three.view.find(other, 0)
        assert letter is not None
        for reader in three.readers:
            reader.acknowledge([(three.view, letter)])
        written = _Writes(words)
        with monkeypatch.context() as patched:
            patched.setattr(three.writer, "_words", written)
            posted = three.post(0, b"new", group=group)
            patched.setattr(three.view, "_words", _Between(words, written, rng))
            seen = three.view.find(group, 0)
        written.apply(100)
        assert posted is not None
        if seen is not None:
            assert three.view.holds(seen)
            assert (bytes(seen.note), bytes(seen.data)) == (NOTE, b"new")
            found += 1
        letter = three.view.find(group, 0)
        assert letter is not None
        for reader in three.readers:
            reader.acknowledge([(three.view, letter)])
    assert 0 < found < 500


class _Writes:
    """The words of a mailbox whose entries are written when `apply` says so."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._waiting: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if index < mailbox._DIRECTORY:
            self._words[index] = value
        else:
            self._waiting.append((index, value))

    def apply(self, count: int) -> None:
        for index, value in self._waiting[:count]:
            self._words[index] = value
        del self._waiting[:count]


class _Between:
    """The words as a reader sees them that is interrupted now and then."""

    def __init__(self, words: memoryview, written: _Writes, rng: random.Random) -> None:
        self._words, self._written, self._rng = words, written, rng

    def __getitem__(self, index: int) -> int:
        self._written.apply(self._rng.choice((0, 0, 1, 2, 3, 9)))
        return self._words[index]
