"""Pipes between ranks, and the one port of a process.

Read in this order.

What ranks send each other: base.py (`Mesh`, what it is), grpc_mesh.py (over gRPC) and memory.py (inside one process); hello.py and
mesh_service.py (how a stream begins), outbox.py (how one is sent on), pulse.py and vigil.py (whether the other end lives). http2/
carries them, over connection.py, tls.py and dialing.py; shared_memory/ has what need not leave a node.

The port: endpoint.py (all of it), listening.py, front_door.py and socket_tasks.py (who comes), direct.py (what our HTTP/2 answers),
admission.py (what grpcio does) with options.py; throttle.py (what is logged of strangers).

What is asked there: handlers.py, then health_service.py, stats_service.py and watching.py, store_service.py,
reflection_service.py; process_memory.py. For HTTP/1 http_port.py, metrics_port.py and metrics.py. Who asks: observe.py, and
rpc_errors.py for what goes wrong.
"""

import shardnet.quiet  # noqa: F401 - before grpc
