"""`Admission`: the private address where grpcio listens behind the front door, and the callers that came through the door.

grpcio listens on a Unix socket that any process of this machine could find and call. So the front door connects to it for each
caller from an address of its own, which nobody can guess. grpcio tells a handler the address of its caller, and for a caller from
any other address no handler runs.
"""

import asyncio
import errno
import os
import socket
import struct
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from shardnet.credentials import Identity

_caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def caller() -> Identity | None:
    """The identity of whoever made the call whose handler runs; None in plaintext."""
    return _caller.get()


class Admission(grpc.aio.ServerInterceptor):
    """An interceptor of the server; lives as long as it."""

    def __init__(self) -> None:
        self._visitors: dict[str, Identity | None] = {}  # by the address that grpcio sees
        self._place: str | tuple[str, int] = ""

    def bind(self, server: grpc.aio.Server) -> None:
        """Have grpcio listen at an address that only this machine reaches. Raises RuntimeError."""
        if sys.platform == "linux":
            name = f"shardnet-{uuid.uuid4()}"
            server.add_insecure_port(f"unix-abstract:{name}")  # a socket without a file: nothing of it is left behind
            self._place = f"\0{name}"
        else:
            self._place = "127.0.0.1", server.add_insecure_port("127.0.0.1:0")

    @asynccontextmanager
    async def visit(self, identity: Identity | None) -> AsyncIterator[socket.socket]:
        """A connection to grpcio on somebody's behalf. Raises OSError."""
        with socket.socket(socket.AF_UNIX if isinstance(self._place, str) else socket.AF_INET) as sock:
            sock.setblocking(False)
            name = f"shardnet-{uuid.uuid4()}"
            if isinstance(self._place, str):
                sock.bind(f"\0{name}")
                address = f"unix-abstract:{name}"
            else:
                sock.bind(("127.0.0.1", 0))
                address = f"ipv4:127.0.0.1:{sock.getsockname()[1]}"
            self._visitors[address] = identity
            try:
                await asyncio.get_running_loop().sock_connect(sock, self._place)
                _check_own(sock)
                yield sock
            finally:
                del self._visitors[address]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the handler so that it runs for visitors only."""
        handler = await continuation(handler_call_details)
        if handler is None:  # nobody knows the method: grpcio answers UNIMPLEMENTED
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            self._guard(getattr(handler, kind)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return guarded

    def _guard(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if (peer := context.peer()) not in self._visitors:
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED, "this address is internal; call the port that this process listens on"
                )
            _caller.set(self._visitors[peer])
            return await behaviour(request, context)

        return run


def _check_own(sock: socket.socket) -> None:
    """Raise ConnectionRefusedError unless the other end is this process: once grpcio has given up its address, for example on closing,
    any process that has read its name (/proc/net/unix) can take it."""
    if sock.family is socket.AF_UNIX and sys.platform == "linux":
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if pid != os.getpid():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another process listens at grpcio's address")


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
