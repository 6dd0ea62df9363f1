"""Helpers for testing programs that are built on shardnet; the project's own tests use them, too.

The fixture `cluster`: plugin.py, cluster_runner.py and cluster_run.py (one run) with meeting.py and news.py; thread_worker.py, or
process_worker.py and on its other side process.py, part.py and frames.py, started by nursery.py and forking.py; rank_failure.py.

Faults in it: fault.py and faults.py, saboteur.py (in a worker) and relays.py (between workers), fault_not_fired.py.

Networks: relay.py with lane.py, pipe.py, conditions.py and harm.py (in front of a port), namespaces.py (the kernel's).

Clusters in one process: cluster.py and jitter.py with ranks.py; their expected results: reference.py and bitwise.py.

The names below are imported when they are first used: a test that only makes namespaces need not wait for torch. So no module here may
have the same name as an object of another one.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardnet.testing import reference
    from shardnet.testing.bitwise import bits, same_bits
    from shardnet.testing.cluster import jitter_cluster, local_cluster, loopback_cluster
    from shardnet.testing.cluster_runner import ClusterRunner
    from shardnet.testing.conditions import Conditions, Way
    from shardnet.testing.fault_not_fired import FaultNotFired
    from shardnet.testing.faults import Faults
    from shardnet.testing.harm import Harm, Kind
    from shardnet.testing.namespaces import NamespacesUnavailable, bridged_nodes
    from shardnet.testing.rank_failure import RankFailure, RanksFailed
    from shardnet.testing.ranks import each_error, each_rank
    from shardnet.testing.relay import Relay

_HOME = {
    "shardnet.testing.bitwise": ("bits", "same_bits"),
    "shardnet.testing.cluster": ("jitter_cluster", "local_cluster", "loopback_cluster"),
    "shardnet.testing.cluster_runner": ("ClusterRunner",),
    "shardnet.testing.conditions": ("Conditions", "Way"),
    "shardnet.testing.fault_not_fired": ("FaultNotFired",),
    "shardnet.testing.faults": ("Faults",),
    "shardnet.testing.harm": ("Harm", "Kind"),
    "shardnet.testing.namespaces": ("NamespacesUnavailable", "bridged_nodes"),
    "shardnet.testing.rank_failure": ("RankFailure", "RanksFailed"),
    "shardnet.testing.ranks": ("each_error", "each_rank"),
    "shardnet.testing.relay": ("Relay",),
}

__all__ = [
    "ClusterRunner",
    "Conditions",
    "FaultNotFired",
    "Faults",
    "Harm",
    "Kind",
    "NamespacesUnavailable",
    "RankFailure",
    "RanksFailed",
    "Relay",
    "Way",
    "bits",
    "bridged_nodes",
    "each_error",
    "each_rank",
    "jitter_cluster",
    "local_cluster",
    "loopback_cluster",
    "reference",
    "same_bits",
]


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name == "reference":
        return importlib.import_module("shardnet.testing.reference")
    raise AttributeError(f"module 'shardnet.testing' has no attribute {name!r}")
