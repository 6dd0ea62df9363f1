"""Keeps gRPC from printing: the rooms that import it import this before.

At its default verbosity it prints every closed connection, and at ERROR each port that it cannot bind; both become errors of our own
(shardnet.errors). It reads this when it is first imported. Not in `shardnet/__init__.py`: torch imports that wherever shardnet is installed
(shardnet/interop/registration.py), also in programs whose gRPC is none of our business.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
