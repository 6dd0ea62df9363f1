"""What a process is told of its cluster: arguments of `connect()`, SHARDNET_* variables, what a scheduler says. Without torch, so that the
launcher can look at them before it starts anybody."""

from shardnet.settings.settings import Settings

__all__ = ["Settings"]
