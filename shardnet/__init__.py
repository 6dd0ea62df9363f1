"""Sharded training of PyTorch models over any network that lets gRPC through."""

import os

# gRPC prints each closed connection at its default verbosity. It reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
