"""`Saboteur`: sits in a worker and waits for the moments of its faults."""

import threading
from collections.abc import Callable, Mapping

from shardnet.telemetry import Pass, TransferDirection
from shardnet.testing.fault import STEP, Fault
from shardnet.training import Cluster


class Saboteur:
    """Watches what one worker does, and calls `act` for each fault that is meant for its rank; lives through all epochs."""

    def __init__(self, faults: Mapping[int, Fault], act: Callable[[int, Fault], None]) -> None:
        """faults  by number, of all ranks
        act     called once per fault, on the thread on which its moment has come
        """
        self._faults = dict(faults)
        self._act = act
        self._step = -1
        self._lock = threading.Lock()

    def attend(self, cluster: Cluster) -> None:
        """Begin, with the faults that are meant for the rank that this worker has now."""
        self._faults = {number: fault for number, fault in self._faults.items() if fault.rank == cluster.rank}
        cluster.telemetry.observe(self)
        self.on_step(cluster.telemetry.step)

    def on_step(self, step: int) -> None:
        self._step = step
        self._happen(STEP)

    def on_pass(self, kind: Pass, computed_ns: Mapping[str, int]) -> None:
        self._happen(kind)

    def on_collective(self, op: str, label: str, start_ns: int, end_ns: int, bytes_sent: int) -> None:
        self._happen(op)

    def on_transfer(self, direction: TransferDirection, duration_ns: int, bytes: int) -> None:
        """There are no faults for copies."""

    def _happen(self, what: str) -> None:
        while self._faults and (order := self._take(what)) is not None:
            self._act(*order)

    def _take(self, what: str) -> tuple[int, Fault] | None:
        with self._lock:
            for number, fault in self._faults.items():
                if fault.after == what and self._step >= fault.at_step:
                    return number, self._faults.pop(number)
        return None
