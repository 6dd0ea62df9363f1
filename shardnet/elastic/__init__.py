"""Training that goes on when workers die and grows when others come; `run` is the entry point.

Read in this order: running.py (epoch after epoch) and state.py (what users call); generation.py (a step's state) and copying.py (how it
is made safe); told.py, choice.py and moving.py (how it is found again); leavers.py (which ranks are told to leave), saves.py
(checkpoints).
"""

from shardnet.elastic.running import run
from shardnet.elastic.state import State

__all__ = ["State", "run"]
