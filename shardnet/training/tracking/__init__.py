"""A training's metrics, where other tools look for them: for each step a record (record.py), which tracker.py hands on to json_lines.py,
tensorboard.py and the user's functions.
"""

from shardnet.training.tracking.record import Record, number, numbers
from shardnet.training.tracking.tracker import Callback, Tracker

__all__ = ["Callback", "Record", "Tracker", "number", "numbers"]
