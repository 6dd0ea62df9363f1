"""A training's metrics, where others look for them: a record.py for each step, which tracker.py hands on to json_lines.py, tensorboard.py
and functions of the user's.
"""

from shardnet.training.tracking.record import Record, numbers
from shardnet.training.tracking.tracker import Callback, Tracker

__all__ = ["Callback", "Record", "Tracker", "numbers"]
