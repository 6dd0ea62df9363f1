"""Keeps gRPC from printing, and out of forked children: packages that import gRPC import this module first.

At its default verbosity gRPC prints every closed connection, and at ERROR each port that it cannot bind; both become errors of our own
(shardnet.errors). And in a forked child, such as a worker of a DataLoader, it would restart its threads, which crash the child
(tests/training/test_program.py); nobody calls gRPC there. gRPC reads both variables when it is first imported. This is not done in
`shardnet/__init__.py`: torch imports that wherever shardnet is installed (shardnet/interop/registration.py), even in programs whose use of
gRPC is not our business.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
