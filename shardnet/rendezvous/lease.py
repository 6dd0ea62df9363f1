"""`Lease`: one open Join call, which is a membership on the wire."""

import grpc

from shardnet.errors import JoinRefused, ProtocolError, ShardnetError
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.rendezvous import messages
from shardnet.rendezvous.events import Event
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.status import refusal_in
from shardnet.transport.rpc_errors import UNREACHABLE, reason, translate


class LeaseBroken(Exception):
    """The call ended without an answer from the rendezvous; joining again may help."""


class Lease:
    """One Join call from its start to its end; the rendezvous counts the worker as a member while it is open."""

    def __init__(self, channel: grpc.aio.Channel, address: str, request: JoinRequest) -> None:
        """Starts the call. `address` is the rendezvous's, for messages."""
        self._address = address
        call = channel.unary_stream(
            f"/{messages.SERVICE}/Join",
            request_serializer=pb.JoinRequest.SerializeToString,
            response_deserializer=pb.MembershipEvent.FromString,
        )
        self._call = call(messages.write_request(request))

    async def next_event(self) -> Event:
        """The next event. Cancelling ends the lease; ending the lease cancels this.

        Raises LeaseBroken when the call is over, JoinRefused, or ProtocolError when no rendezvous of ours answers.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            translated = self._translate(error)
            raise translated from None if isinstance(translated, JoinRefused) else error  # gRPC's own error says the same, and twice
        if not isinstance(message, pb.MembershipEvent):  # grpc.aio.EOF
            raise LeaseBroken("the rendezvous ended the call")
        return messages.read_event(message)

    def end(self) -> None:
        """Give the membership up at once."""
        self._call.cancel()

    def _translate(self, error: grpc.aio.AioRpcError) -> ShardnetError | LeaseBroken:
        if (refusal := refusal_in(error)) is not None:
            return refusal
        if error.code() in UNREACHABLE:
            return LeaseBroken(reason(error))
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(
                f"the server at {self._address} is not a rendezvous (a worker's address?); "
                "give the address that `shardnet rendezvous` prints"
            )
        return translate(error, self._address, "Join")
