"""The public loop: join a cluster, shard a model, train, leave.

Read in this order: cluster.py (what users call), station.py (what outlives an epoch) and seat.py (a place in one); program.py (`run`),
leaving.py, departure.py and last_words.py (how a program ends), tracebacks.py (what its author reads after an error). Beside the loop:
sampler.py (which rank trains on which samples), tracking/ (metrics, for other tools to show), record.py and report.py (a run as a page).
To look into a process: snapshot.py (statistics), trace.py (timelines), diagnosis.py with doorbell.py (what it does now), black_box.py
(what it did last).
"""

from shardnet.training.cluster import Cluster, connect
from shardnet.training.departure import Departure
from shardnet.training.program import run

__all__ = ["Cluster", "Departure", "connect", "run"]
