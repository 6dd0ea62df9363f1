"""The state that a training must not lose: its models, optimizers and the rest, as pieces that any number of ranks can share out.

Read piece.py, part.py (one thing), model_part.py (a sharded model) and parts.py (the other things) with modules.py (of a module), then
inventory.py (all of them); randomness.py and snapshot.py.
"""

from shardnet.state.inventory import Inventory, Kept
from shardnet.state.part import Whole
from shardnet.state.piece import VALUES, Piece, Span, covered, join
from shardnet.state.randomness import random_state, set_random_state
from shardnet.state.snapshot import Snapshot

__all__ = ["VALUES", "Inventory", "Kept", "Piece", "Snapshot", "Span", "Whole", "covered", "join", "random_state", "set_random_state"]
