"""Pipes between ranks, and the one port of a process.

Read in this order.

What ranks send each other: base.py (`Mesh`, the interface), grpc_mesh.py (over gRPC) and memory.py (inside one process); hello.py and
mesh_service.py (how a stream begins), outbox.py (how a rank sends on its stream), pulse.py and vigil.py (whether the other end is
alive). http2/ carries the streams, over connection.py, tls.py and dialing.py; shared_memory/ carries data that stays inside a node.

The port: endpoint.py (all of it), listening.py, front_door.py, strangers.py and socket_tasks.py (how callers come in), direct.py (the
calls that our own HTTP/2 answers), admission.py (the calls that grpcio answers) with options.py; throttle.py (limits what strangers put
in the log).

The services on the port: handlers.py, then health_service.py, stats_service.py and watching.py, store_service.py,
reflection_service.py; process_memory.py. For HTTP/1 http_port.py, metrics_port.py and metrics.py. The client side: observe.py, and
rpc_errors.py, which turns gRPC's errors into ours.
"""

import shardnet.quiet  # noqa: F401 - before grpc
