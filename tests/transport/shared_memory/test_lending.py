"""Data that is read directly in the lender's memory, in this process and in others."""

import ctypes
import errno
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory import lending
from shardnet.transport.shared_memory.lending import Borrowed, Lender, Loan, Secret, can_read
from shardnet.wire import LoanRevoked

pytestmark = pytest.mark.skipif(lending._process_vm_readv is None, reason="this system has no process_vm_readv")
SECRET = bytes(range(32))
LENDER = """
import sys
from shardnet.transport.shared_memory.lending import Loan, Secret
data, loan, secret = bytes(range(256)) * 4096, Loan(), Secret(bytes(range(32)))
print(secret.address, loan.of(data).SerializeToString().hex(), flush=True)
sys.stdin.readline()
loan.revoke()
print("revoked", flush=True)
sys.stdin.readline()
"""


def read(borrowed: Borrowed, start: int = 0, size: int | None = None) -> bytes:
    target = np.zeros(borrowed.size - start if size is None else size, np.uint8)
    borrowed.read(start, target)
    return target.tobytes()


def test_any_part_of_it_is_read() -> None:
    data, loan = bytes(range(100)), Loan()
    borrowed = Borrowed.of(os.getpid(), loan.of(data))
    assert (borrowed.size, read(borrowed), read(borrowed, 40), read(borrowed, 7, 3)) == (100, data, data[40:], data[7:10])


def test_the_reader_gets_what_is_there_when_it_reads() -> None:
    """It gets the present data and not an earlier copy, which is what loans are for."""
    data, loan = np.zeros(100, np.uint8), Loan()
    borrowed = Borrowed.of(os.getpid(), loan.of(data.data))
    data[:] = 7
    assert read(borrowed) == b"\7" * 100


def test_what_was_revoked_is_worth_nothing() -> None:
    data, loan, other = bytes(100), Loan(), Loan()
    borrowed, standing = Borrowed.of(os.getpid(), loan.of(data)), Borrowed.of(os.getpid(), other.of(data))
    loan.revoke()
    with pytest.raises(LoanRevoked):
        read(borrowed)
    assert read(standing) == data  # each collective has a loan of its own


@pytest.mark.parametrize("field", ["address", "token_address"])
def test_memory_that_is_not_there_is_worth_nothing(field: str) -> None:
    data = bytes(100)
    place = Loan().of(data)
    setattr(place, field, 4096)
    with pytest.raises(LoanRevoked):
        read(Borrowed.of(os.getpid(), place))


@pytest.mark.parametrize("count", [2, 3, 1022, 1023, 1024, 5000])
def test_pieces_are_read_as_one_however_many_they_are(count: int) -> None:
    """The kernel takes no more than 1024 places in one call."""
    whole, loan = np.random.default_rng(count).integers(0, 256, 7 * count, np.uint8), Loan()
    pieces = [piece.copy() for piece in np.split(whole, sorted({0, *range(3, 7 * count, 7)}))]  # an empty one first
    lender = Lender(os.getpid(), loan.letter([[whole], pieces], b"note"))
    assert lender.note == b"note"
    lot = lender.part(1, 2, len(whole) - 5)
    assert (lot.size, read(lot)) == (len(whole) - 5, whole[2:-3].tobytes())
    assert read(lot, 1, 2) == whole[3:5].tobytes()
    assert read(lender.part(0, 1, 2)) == whole[1:3].tobytes()
    with pytest.raises(ProtocolError, match="lends 1 bytes less"):
        read(lot, lot.size - 2, 3)
    loan.revoke()
    with pytest.raises(LoanRevoked):
        read(lot)


def test_a_letter_that_makes_no_sense() -> None:
    letter = Loan().letter([[np.zeros(8, np.uint8)]] * 3)
    for size in (8, 32, 48, len(letter) - 8):
        with pytest.raises(ValueError, match="buffer"):
            Lender(os.getpid(), letter[:size])


def test_another_process_lends_takes_back_and_dies() -> None:
    with subprocess.Popen([sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        address, place = lender.stdout.readline().split()
        offer = mesh_pb2.WindowOffer(pid=lender.pid, secret=SECRET, secret_address=int(address))
        assert can_read(offer)
        loan = mesh_pb2.Loan.FromString(bytes.fromhex(place))
        borrowed, lasting = Borrowed.of(lender.pid, loan), Borrowed.of(lender.pid, loan)
        assert read(borrowed) == bytes(range(256)) * 4096
        print(file=lender.stdin, flush=True)
        assert lender.stdout.readline() == "revoked\n"
        with pytest.raises(LoanRevoked):
            read(borrowed)
        lender.kill()
        lender.wait()
        with pytest.raises(LoanRevoked):
            read(lasting)
        assert not can_read(offer)


def test_only_a_process_that_has_the_secret_is_read() -> None:
    secret = Secret(SECRET)
    offer = mesh_pb2.WindowOffer(pid=os.getpid(), secret=SECRET, secret_address=secret.address)
    assert can_read(offer)
    offer.secret = SECRET[:-1] + b"!"
    assert not can_read(offer)


def test_a_system_that_forbids_it_is_no_lender(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, loan, data = Secret(SECRET), Loan(), bytes(8)
    offer = mesh_pb2.WindowOffer(pid=os.getpid(), secret=SECRET, secret_address=secret.address)
    borrowed = Borrowed.of(os.getpid(), loan.of(data))

    def forbidden(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(lending, "_process_vm_readv", forbidden)
    assert not can_read(offer)
    with pytest.raises(ProtocolError, match=f"process {os.getpid()} cannot be read any more: Operation not permitted"):
        read(borrowed)
    monkeypatch.setattr(lending, "_process_vm_readv", None)
    assert not can_read(offer)
