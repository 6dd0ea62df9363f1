"""Data that is read where it lies, straight from the process of another rank of this node.

[Note: loans] What lies in memory that stays as it is until its collective ends need not be copied into a window. A word on its stream, or
a letter, says where it is, and each reader copies it from there to where it belongs, with one call to the kernel (process_vm_readv, for
which the system must let one process look into the other). So a byte is copied once instead of twice, and no room is waited for.

A loan ends with its collective, and a collective that goes well ends when each reader has said that it has read everything. One
that fails is not waited for: its loan is revoked before the caller may use the memory again. A token says which it was: a
number in the lender's memory that is read in the same call, behind the data. Where it is not the one that was told, the
data is worth nothing: the lender has given up, or died, and its process number belongs to another.
"""

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence

import numpy as np

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.wire import Buffer, LoanRevoked

_GONE = (errno.ESRCH, errno.EFAULT)  # the process, or what it had there


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_Spans = _Span * 2


class Secret:
    """Bytes at a known place of this process's memory, by which another one shows that it can read it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._copy = np.frombuffer(bytearray(content), np.uint8)
        self.address = _address(self._copy)


class Loan:
    """Leave to read what this rank lends in one collective, until that ends."""

    def __init__(self) -> None:
        self._token = np.array([secrets.randbits(64)], np.uint64)
        self._told = int(self._token[0])

    def of(self, data: Buffer) -> mesh_pb2.Loan:
        """What a reader has to know. `data` must stay as it is until all readers have returned it, or the loan is revoked."""
        view = np.frombuffer(data, np.uint8)
        return mesh_pb2.Loan(address=_address(view), size=len(view), token_address=_address(self._token), token=self._told)

    def letter(self, arrays: Sequence[np.ndarray], note: bytes = b"") -> bytes:
        """The same of several arrays for a reader who knows how large they are, behind a word for the lender to mark, and before a note:
        see `Lender`."""
        words = [0, _address(self._token), self._told, len(arrays), *map(_address, arrays)]
        return np.array(words, np.uint64).tobytes() + note

    def revoke(self) -> None:
        """What is read from now on, or at this moment, is worth nothing."""
        self._token[0] = ~self._token[0]


class Borrowed:
    """Data of another process that was not read yet."""

    returns = True

    def __init__(self, pid: int, loan: mesh_pb2.Loan) -> None:
        self._pid = pid
        self._loan = loan
        self.size = loan.size

    def read(self, start: int, target: "np.ndarray") -> None:
        """Copy the bytes from `start` on into `target`, a contiguous array, and let other threads run meanwhile.

        Raises LoanRevoked if they are not lent any more, and ProtocolError if the system forbids it.
        """
        token = ctypes.c_uint64()
        here = _Spans(_Span(_address(target), target.nbytes), _Span(ctypes.addressof(token), 8))
        there = _Spans(_Span(self._loan.address + start, target.nbytes), _Span(self._loan.token_address, 8))
        count, error = _read(self._pid, here, there)
        if count < 0 and error not in _GONE:
            raise ProtocolError(f"the memory of process {self._pid} cannot be read any more: {os.strerror(error)}")
        if count != target.nbytes + 8 or token.value != self._loan.token:
            raise LoanRevoked


class Lender:
    """Another process that lends arrays, as its letter says. Raises ValueError if it makes no sense."""

    def __init__(self, pid: int, letter: Buffer) -> None:
        self._pid = pid
        _, self._token_address, self._token, arrays = np.frombuffer(letter, np.uint64, 4).tolist()
        self._addresses = np.frombuffer(letter, np.uint64, arrays, 32).tolist() if arrays else []
        self.note = bytes(letter[32 + 8 * arrays :])

    def part(self, array: int, start: int, size: int) -> Borrowed:
        """Bytes of one of its arrays."""
        loan = mesh_pb2.Loan(address=self._addresses[array] + start, size=size, token_address=self._token_address, token=self._token)
        return Borrowed(self._pid, loan)


def can_read(offer: mesh_pb2.WindowOffer) -> bool:
    """Whether the memory of the process that made the offer can be read from here."""
    found = np.empty(len(offer.secret), np.uint8)
    here, there = _Spans(_Span(_address(found), found.nbytes)), _Spans(_Span(offer.secret_address, found.nbytes))
    count, _ = _read(offer.pid, here, there)
    return count == found.nbytes and secrets.compare_digest(found.tobytes(), offer.secret)


def _read(pid: int, here: "ctypes.Array[_Span]", there: "ctypes.Array[_Span]") -> tuple[int, int]:
    """How many bytes were copied, or -1, and the error number then."""
    if _process_vm_readv is None:
        return -1, errno.ENOSYS
    count: int = _process_vm_readv(pid, here, len(here), there, len(there), 0)
    return count, ctypes.get_errno()


def _address(array: "np.ndarray") -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_process_vm_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)  # Linux has it
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = (
        ctypes.c_int,
        *(ctypes.POINTER(_Span), ctypes.c_ulong),
        *(ctypes.POINTER(_Span), ctypes.c_ulong),
        ctypes.c_ulong,
    )
