"""Rails: every rank's data has one way to each node, and one rank of that node serves it."""

import pytest

from shardnet.backend.rails import Rails
from shardnet.collectives.route import Nodes

NODES: list[Nodes] = [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3, 4, 5)), ((0, 3), (1, 2))]


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_each_rank_has_one_rail_to_each_node(nodes: Nodes) -> None:
    ranks = sorted(rank for node in nodes for rank in node)
    views = {rank: Rails.of(nodes, rank) for rank in ranks}
    width = max(map(len, nodes))
    for rail in range(width):
        servers = [rank for rank in ranks if rail in views[rank].mine]
        assert len(servers) == len(nodes)
        for rank in servers:
            assert views[rank].servers(rail) == servers
            owners = views[rank].owners(rail)
            for server, owner in zip(servers, owners, strict=True):
                node = views[server].node
                assert owner == (node[rail] if rail < len(node) else None)
    carried = [owner for rail in range(width) for owner in views[0].owners(rail) if owner is not None]
    assert sorted(carried) == ranks


def test_layers_give_each_member_the_ranks_whose_rails_it_serves() -> None:
    rails = Rails.of(((0, 1, 2, 3, 4), (5, 6)), 6)
    assert rails.layers(0) == [(0, 1), (2, 3), (4,)]
    assert rails.mine == [1, 3]
    assert [layer[rails.member] for layer in rails.layers(0) if rails.member < len(layer)] == [1, 3]
