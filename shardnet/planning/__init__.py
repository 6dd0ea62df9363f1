"""What a training will need, computed before it starts: bytes per rank, and traffic per step. Arithmetic only, no traffic.

Read in this order: model.py (units and their sizes), setting.py (ranks, links and choices), memory.py with activations.py (what a
forward keeps), traffic.py, plan.py (all of it).
"""

from shardnet.planning.activations import activation_bytes
from shardnet.planning.memory import MemoryPlan
from shardnet.planning.model import GroupSize, ModelSize, UnitSize
from shardnet.planning.plan import Plan, plan
from shardnet.planning.setting import OptimizerKind, Setting, Strategy
from shardnet.planning.traffic import Traffic

__all__ = [
    "GroupSize",
    "MemoryPlan",
    "ModelSize",
    "OptimizerKind",
    "Plan",
    "Setting",
    "Strategy",
    "Traffic",
    "UnitSize",
    "activation_bytes",
    "plan",
]
