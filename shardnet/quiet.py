"""Keeps gRPC from printing, and out of forked children: the rooms that import it import this before.

At its default verbosity it prints every closed connection, and at ERROR each port that it cannot bind; both become errors of our own
(shardnet.errors). And in a forked child, such as a worker of a DataLoader, it would begin threads anew, which crash it
(tests/training/test_program.py); nobody calls gRPC there. It reads both when it is first imported. Not in `shardnet/__init__.py`: torch
imports that wherever shardnet is installed (shardnet/interop/registration.py), also in programs whose gRPC is none of our business.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
