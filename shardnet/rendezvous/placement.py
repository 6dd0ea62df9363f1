"""Who gets which rank.

[Note: rank order] Nodes are ordered by their first arrival; inside a node workers are ordered by their launcher's hint,
then by arrival. So the ranks of one node are consecutive, and of all the ring's links only one a node leaves it. The
same arrivals give the same ranks.
"""

from collections.abc import Sequence

from shardnet.rendezvous.request import JoinRequest
from shardnet.topology import Member


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
