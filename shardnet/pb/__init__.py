"""Generated protobuf messages and gRPC stubs; `make proto` writes them from protos/. Only the wire and the services import them."""

import shardnet.quiet  # noqa: F401 - before grpc
