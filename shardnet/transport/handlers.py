"""gRPC handlers that never show a caller the inside of this process.

grpc.aio answers an exception with its text, and writes a traceback to the log for a message that cannot be parsed. These handlers
log an exception and answer "internal error", and treat a message that cannot be parsed as the caller's mistake: INVALID_ARGUMENT.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)
Context = grpc.aio.ServicerContext[bytes, Reply]


def unary(kind: type[Request], answer: Callable[[Request, Context[Reply]], Awaitable[Reply]]) -> "grpc.RpcMethodHandler[bytes, Reply]":
    """A handler for one request and one reply."""

    async def handle(data: bytes, context: Context[Reply]) -> Reply:
        request = await _parse(kind, data, context)
        return await _guard(answer(request, context), context)

    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)


def stream(kind: type[Request], answer: Callable[[Request, Context[Reply]], Awaitable[None]]) -> "grpc.RpcMethodHandler[bytes, Reply]":
    """A handler for one request and many replies. `answer` writes them to the context.

    `answer` is a coroutine and not a generator: grpc.aio leaves a generator to the garbage collector when the caller is gone,
    so that its `finally` would run at any time later.
    """

    async def handle(data: bytes, context: Context[Reply]) -> None:
        request = await _parse(kind, data, context)
        await _guard(answer(request, context), context)

    return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)


def exchange(
    kind: type[Request], answer: Callable[[AsyncGenerator[Request, None], Context[Reply]], Awaitable[None]]
) -> "grpc.RpcMethodHandler[bytes, Reply]":
    """A handler for many requests and many replies. `answer` reads the requests, and writes the replies to the context; see `stream`."""

    async def handle(stream: AsyncIterator[bytes], context: Context[Reply]) -> None:
        async def requests() -> AsyncGenerator[Request, None]:
            async for data in stream:
                yield await _parse(kind, data, context)

        async with aclosing(requests()) as said:
            await _guard(answer(said, context), context)

    return grpc.stream_stream_rpc_method_handler(handle, response_serializer=_serialize)


async def _parse(kind: type[Request], data: bytes, context: Context[Reply]) -> Request:
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a valid {kind.__name__} message")


T = TypeVar("T")


async def _guard(answer: Awaitable[T], context: Context[Reply]) -> T:
    try:
        return await answer
    except grpc.aio.AbortError:  # an intended answer
        raise
    except grpc.aio.InternalError:  # the caller is gone: nothing can be written any more, and nobody would read it
        raise asyncio.CancelledError from None
    except Exception:
        log.exception("answering %s failed", context.peer())
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the log of the process that was called")


def _serialize(reply: Message) -> bytes:
    return reply.SerializeToString()
