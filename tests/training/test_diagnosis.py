"""The facts that a process reports about itself."""

from typing import cast

from shardnet.flight import Flight, Party
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.training.diagnosis import Diagnosis
from shardnet.waiting import Absent, Waiting


async def test_whom_it_waits_for_until_that_has_ended() -> None:
    """A wait that has ended is still reported for a moment."""
    flights = [Flight(Party(1, 0, (0, 1, 2, 3)), number, "barrier", "", 0, 1) for number in range(2)]
    absent = [(Absent(3, "a"), Absent(1, "b")), (Absent(3, "a"),)]
    telemetry, diagnosis = Telemetry(), Diagnosis()
    telemetry.waiting = tuple(map(Waiting, flights, absent))
    diagnosis.about(telemetry, lambda: cast(Topology, None))
    assert diagnosis.waits_for() == [1, 3]
    flights[0].ended_ns = 2
    assert diagnosis.waits_for() == [3]
