"""gRPC calls that carry tensors without copies: our own HTTP/2, with one streaming call per connection.

grpcio copies a payload once to send it and twice to receive it, holding the interpreter lock; a chunk of 2 MiB costs
more time there than in the kernel. Here the kernel reads from the sender's tensor and writes into the buffer from which the
receiver reduces. The bytes on the wire are gRPC (HTTP/2 and its protocol mapping): grpcio may be at either end, and a proxy
that knows gRPC in between.

    frames    HTTP/2 frames as bytes                                 (RFC 9113)
    headers   requests, replies and trailers of a gRPC call          (RFC 7541, gRPC over HTTP/2)
    reading   cuts incoming bytes into frames and messages; no I/O
    writing   cuts outgoing messages into frames as the peer's windows allow; no I/O
    state     what the frames of a call mean; no I/O
    call      one call on one socket, either end
"""

from shardnet.transport.http2.call import OPENING, Call
from shardnet.transport.http2.headers import Headers, Status
from shardnet.transport.http2.state import CallBroken

__all__ = ["OPENING", "Call", "CallBroken", "Headers", "Status"]
