"""Which worker gets which rank.

[Note: rank order] Nodes are ordered by their first arrival; inside a node workers are ordered by their launcher's hint,
then by arrival. So the ranks of one node are consecutive, and only one link of the ring leaves each node. The
same arrivals give the same ranks.

A worker that a scheduler has numbered wishes to have the rank that the scheduler gave it. If all workers of a first epoch have a wish,
and all wishes differ, the order of the wishes replaces the order of arrival. So each worker gets its wish if the scheduler has numbered
node by node, as most do. If the scheduler has dealt out ranks to the nodes in turn, the ranks of a node still stay together, and the
nodes are ordered by their lowest wishes. In later epochs the old order counts.
"""

from collections.abc import Sequence

from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Member


def by_wish(arrivals: Sequence[JoinRequest]) -> Sequence[JoinRequest]:
    """The requests in the order of their wishes; unchanged if the wishes do not count."""
    wishes = {request.wished_rank: request for request in arrivals}
    if None in wishes or len(wishes) < len(arrivals) or any(request.last_epoch for request in arrivals):
        return arrivals
    return sorted(arrivals, key=lambda request: request.wished_rank or 0)


def place(arrivals: Sequence[JoinRequest]) -> tuple[Member, ...]:
    """The members by rank, for requests in order of arrival."""
    nodes: dict[str, list[JoinRequest]] = {}
    for request in arrivals:
        nodes.setdefault(request.node, []).append(request)
    members: list[Member] = []
    for node_group, (node, requests) in enumerate(nodes.items()):
        # sorted() is stable: equal hints keep their order of arrival
        for local_rank, request in enumerate(sorted(requests, key=lambda r: r.local_rank_hint)):
            place = (len(members), local_rank, node_group)
            members.append(Member(*place, request.address, node, request.incarnation, request.identity))
    return tuple(members)
