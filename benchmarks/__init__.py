"""Measuring shardnet against torch's gloo and FSDP2: `python -m benchmarks`.

Read in this order: options.py (what can be asked for), plan.py (what that means to measure), launching.py and nodes.py
(the processes that measure), measuring.py (what each of them does), race.py (how time is taken), collectives.py and training.py (what
is timed), row.py (what comes out), tables.py and targets.py (how to read it).
"""

import sys
from pathlib import Path

# The model that is trained here is in workers/, whose files are imported by their bare names.
sys.path.append(str(Path(__file__).resolve().parents[1] / "workers"))
