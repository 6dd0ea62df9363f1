"""Workers for the tests of the rendezvous, by number."""

from collections.abc import Sequence

from shardnet.rendezvous.events import Assigned, Event, Lost, Notice, Waiting
from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Topology


def worker(
    number: int, *, least: int = 2, most: int = 2, node: str = "a", hint: int = 0, job: str = "job", address: str = ""
) -> JoinRequest:
    """The request of worker `number`: incarnation `w<number>`, port 7000 + number."""
    address = address or f"10.0.0.1:{7000 + number}"
    return JoinRequest(job, f"w{number}", address, node, least, most, hint)


def to(notices: Sequence[Notice], number: int) -> list[Event]:
    """What worker `number` is told."""
    return [n.event for n in notices if n.to == f"w{number}"]


def assigned(notices: Sequence[Notice]) -> dict[str, Topology]:
    """The topology that each incarnation is given."""
    return {n.to: n.event.topology for n in notices if isinstance(n.event, Assigned)}


def waiting(notices: Sequence[Notice]) -> dict[str, int]:
    """The number of joined workers that each incarnation is told."""
    return {n.to: n.event.joined for n in notices if isinstance(n.event, Waiting)}


def lost(notices: Sequence[Notice]) -> dict[str, tuple[int, bool]]:
    """The lost rank that each incarnation is told, and whether that rank left."""
    return {n.to: (n.event.rank, n.event.left) for n in notices if isinstance(n.event, Lost)}
