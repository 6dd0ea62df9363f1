"""What a process is told about its cluster: arguments of `connect()` and SHARDNET_* variables (settings.py), and what a scheduler says
(hints.py). Does not import torch, so that the launcher can check the settings before it starts a worker.
"""

from shardnet.settings.settings import Settings

__all__ = ["Settings"]
