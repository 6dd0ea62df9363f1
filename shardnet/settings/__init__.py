"""What a process is told of its cluster: arguments of `connect()` and SHARDNET_* variables (settings.py), and what a scheduler says
(hints.py). Without torch, so that the launcher can look at them before it starts anybody.
"""

from shardnet.settings.settings import Settings

__all__ = ["Settings"]
