"""`Ledger`: the numbers of one group's collectives, and chunks that came for those which this rank has not entered.

[Note: the ledger] Every collective of a group has a sequence number, counted on each rank in the order of the calls.
Before data flows, each rank announces to the peers that will send to it which collective it takes this to be. A peer that
takes it for a different one aborts it for everyone, naming both sides. Since the announcements of one collective
connect all ranks, no two ranks can disagree unnoticed. A failed collective uses up its number and nothing else: the
next one is unaffected, and chunks that arrive late for the failed one are recognised by their number and dropped.

Data goes only to a peer that has announced, with one exception: in a collective in which every rank waits for every other, the first
`Limits.direct_bytes` per peer are sent at once, after the announcement or with it, and may arrive before the call. So for collectives that
it has not entered yet, a rank never holds more than max_outstanding × eager_bytes of data per peer and group that it has made. For all
groups together that it has yet to make, which get messages but no data, it holds no more than that per peer. A peer that sends more is cut
off (early.py). Lent data stays with its lender, so messages about loans may come early, too.
"""

import threading
import time

from shardnet.collectives.early import Early
from shardnet.collectives.operation import Call
from shardnet.config import Limits
from shardnet.flight import Flight, Party
from shardnet.pb import mesh_pb2
from shardnet.telemetry import Telemetry


class Ledger:
    """One rank's. Any thread may number a collective. Call a method marked "under the lock" with `lock` held."""

    def __init__(self, party: Party, telemetry: Telemetry, limits: Limits, first: int) -> None:
        self.lock = threading.Lock()
        self.early = Early(limits)  # by number; senders are ranks of the group; changed on the loop thread only
        self.last_signature = ""  # of the collective entered last
        self._party = party
        self._telemetry = telemetry
        self._next = first  # the next number to give out
        self._ahead: set[int] = set()  # numbers that were given out but whose collectives are not entered yet

    def draft(self, call: Call) -> Flight:
        """A draft of the next collective, for the flight recorder. `take` or `take_ahead` gives out its number: if a Ctrl-C comes before
        that, no other rank has to wait for it. Under the lock."""
        telemetry = self._telemetry
        return telemetry.flights.begin(Flight(self._party, self._next, call.op, call.label, telemetry.step, time.perf_counter_ns()))

    def take(self, flight: Flight) -> bool:
        """Give out the number of a draft that is entered as soon as the lock is free. Returns whether the number was still to be given out.
        Under the lock."""
        is_new = flight.sequence >= self._next
        self._next = max(self._next, flight.sequence + 1)
        return is_new

    def take_ahead(self, flight: Flight) -> None:
        """Give out the number of a draft that counts as entered only after `enter`. Under the lock."""
        self._ahead.add(flight.sequence)
        self.take(flight)

    def has_given(self, flight: Flight) -> bool:
        """Whether a draft's number was given out before a Ctrl-C came; otherwise the number is free again. Under the lock."""
        if flight.sequence >= self._next:
            self._ahead.discard(flight.sequence)
        return flight.sequence < self._next

    def is_ahead(self, sequence: int) -> bool:
        """Whether a number was given out, but its collective is not entered yet."""
        with self.lock:
            return sequence in self._ahead

    def enter(self, sequence: int, signature: str) -> None:
        with self.lock:
            self._ahead.discard(sequence)
        self.last_signature = signature

    def is_next_announced(self) -> bool:
        """Whether something has come for the next collective. Under the lock."""
        return self._next in self.early

    def announced_since(self) -> int | None:
        """When something first came for the next collective, which this rank has not begun, by time.monotonic_ns; None: nothing has."""
        with self.lock:
            return self.early.since(self._next)

    def has_entered(self, sequence: int) -> bool:
        return sequence < self._next and sequence not in self._ahead

    @property
    def is_settled(self) -> bool:
        """Whether every numbered collective is entered, and nothing has come for one that is not."""
        with self.lock:
            return not (self._ahead or self.early)

    @property
    def position(self) -> int:
        """The lowest number whose collective is not entered yet."""
        with self.lock:
            return min(self._ahead, default=self._next)

    def answer(self, probe: mesh_pb2.Probe, sequence: int, waits_in: str) -> mesh_pb2.ProbeReply:
        """The reply to another rank's probe: where this rank is."""
        return mesh_pb2.ProbeReply(
            id=probe.id,
            entered=self.has_entered(sequence),
            next_sequence=self.position,
            last_signature=self.last_signature,
            waits_in=waits_in,
        )
