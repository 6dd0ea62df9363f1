"""How fast a training is and where its time goes: one rank's figures, and the cluster's.

Read figures.py (the figures to decide by) and recorder.py (where they come from) with busy.py and link.py; cluster.py (all ranks'
figures). zero3.py has the counters that ZeRO-3 systems commonly report; their parts are in throughput.py, communication.py,
layers.py, transfers.py and efficiency.py.
"""

from shardnet.performance.cluster import cluster_figures, cluster_stats
from shardnet.performance.communication import CommunicationOperation
from shardnet.performance.figures import TrainingFigures
from shardnet.performance.layers import LayerTimingStats
from shardnet.performance.link import measure_link
from shardnet.performance.recorder import PerformanceRecorder
from shardnet.performance.zero3 import LayerPerformance, PerformanceSummary, Zero3PerformanceStats
from shardnet.telemetry import TransferDirection

__all__ = [
    "CommunicationOperation",
    "LayerPerformance",
    "LayerTimingStats",
    "PerformanceRecorder",
    "PerformanceSummary",
    "TrainingFigures",
    "TransferDirection",
    "Zero3PerformanceStats",
    "cluster_figures",
    "cluster_stats",
    "measure_link",
]
