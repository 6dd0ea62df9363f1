"""Checkpoints: a training's state in files, written by all ranks and read by any number of them.

folder.py       the checkpoints of one folder: which there are, and how one appears there whole or not at all
manifest.py     what a checkpoint consists of
rank_file.py    what one rank writes, and parts of it read back
tensor_file.py  the same in the format's terms, written
direct_file.py  a file past the system's page cache
blocks.py       checksums of what is read in parts
duties.py       which rank writes what several ranks have
idle_thread.py  where files are written while the training goes on
reading.py      what one rank needs
checkpoints.py  saving and loading, with all ranks
weights.py      a model's parameters as files for others, and back
looking.py      checkpoints as files, without a training
"""

from shardnet.checkpoint.checkpoints import Checkpoints, Loaded
from shardnet.checkpoint.weights import open_weights, read_weights, write_weights

__all__ = ["Checkpoints", "Loaded", "open_weights", "read_weights", "write_weights"]
