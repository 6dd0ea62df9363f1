import shardnet.quiet  # noqa: F401 - before grpc
