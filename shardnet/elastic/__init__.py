"""Training that goes on when workers die and grows when others come; `run` is the way in."""

from shardnet.elastic.running import run
from shardnet.elastic.state import State

__all__ = ["State", "run"]
