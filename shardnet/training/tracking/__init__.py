"""A training's metrics, where others look for them: JSON lines, TensorBoard, and functions of the user's."""

from shardnet.training.tracking.record import Record, numbers
from shardnet.training.tracking.tracker import Callback, Tracker

__all__ = ["Callback", "Record", "Tracker", "numbers"]
