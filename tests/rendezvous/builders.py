"""Workers for the tests of the rendezvous, by number."""

from collections.abc import Sequence
from dataclasses import replace

from shardnet.rendezvous.events import Assigned, Event, Joiners, Lost, Notice, Waiting
from shardnet.rendezvous.membership import Registry
from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Topology

SETTLE = 2.0  # seconds, of the registries whose workers `formed` makes


def worker(
    number: int, *, least: int = 2, most: int = 2, node: str = "a", hint: int = 0, job: str = "job", address: str = ""
) -> JoinRequest:
    """The request of worker `number`: incarnation `w<number>`, port 7000 + number."""
    address = address or f"10.0.0.1:{7000 + number}"
    return JoinRequest(job, f"w{number}", address, node, least, most, hint)


def elastic(number: int, *, least: int = 2, most: int = 4) -> JoinRequest:
    """The request of a worker of an elastic job."""
    return replace(worker(number, least=least, most=most), elastic=True)


def again(request: JoinRequest, *, epoch: int = 1) -> JoinRequest:
    """The same worker, joining for the next epoch."""
    return replace(request, incarnation=f"{request.incarnation}+", previous=request.incarnation, last_epoch=epoch)


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


def joiners(notices: Sequence[Notice]) -> dict[str, int]:
    """The number of joiners that each member is told."""
    return {n.to: n.event.count for n in notices if isinstance(n.event, Joiners)}


def formed(registry: Registry, count: int, *, least: int = 2, most: int = 4) -> list[JoinRequest]:
    """The workers of a running epoch, by rank."""
    requests = [elastic(number, least=least, most=most) for number in range(count)]
    notices = [notice for request in requests for notice in registry.join(request, 0.0)]
    if count < most:
        notices = registry.tick(SETTLE)
    assert [assigned(notices)[request.incarnation].rank for request in requests] == list(range(count))
    return requests
