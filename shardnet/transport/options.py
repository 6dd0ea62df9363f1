"""grpcio's options for every channel and server, and for each one the failure that returns if the option is removed.

[Note: keepalive] Finding a frozen or cut-off peer takes all of these together. A ping goes out after
`keepalive_time` of silence, and the connection is dropped when the ping stays unanswered for `keepalive_timeout`.
`http2.ping_timeout` must equal `keepalive_timeout`: otherwise gRPC's default of 60 s wins, and a frozen peer is noticed after 61 s.
Both sides ping, so that either may be the one that freezes: the server's pings end the lease of a frozen worker.

[Note: flow control of grpcio] This concerns mesh streams that come through a proxy; the others do not use grpcio (http2/). A sender may
be one window ahead of the window updates that its receiver sends. By default the window starts at 64 KiB and grows as gRPC
estimates the link, and a stream of large messages stalls on it: an all-gather of 16 MiB between two ranks took 47 ms, of
which 13 were work. With a fixed window of 16 MiB and frames of 4 MiB instead of 16 KiB it took 17 ms. A slow reader cannot
make us hold memory by this: the receiver takes arriving data at once (transport/base.py).
"""

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Options

HANDSHAKE_S = 3.0  # a connection that says nothing for this long is closed
ONLOOKER_LOST_S = 4.0  # of silence after which a watcher of statistics over our own HTTP/2 counts as gone
ONLOOKER_PING_MS = 3000  # the loss of a mere watcher may be noticed later: a ping a second would cost more than all its statistics
MAX_STREAMS_PER_CONNECTION = 64  # a worker needs a handful: two streams, health, statistics


def _keepalive(timeouts: Timeouts, least_ms: int = 0) -> list[tuple[str, int]]:
    """least_ms  the shortest time from one ping to the next"""
    suspect_ms = _ms(timeouts.suspect_s)
    return [
        ("grpc.keepalive_time_ms", max(least_ms, _ping_interval_ms(timeouts))),
        ("grpc.keepalive_timeout_ms", suspect_ms),
        ("grpc.http2.ping_timeout_ms", suspect_ms),  # see [Note: keepalive]
        ("grpc.keepalive_permit_without_calls", 1),  # a connection between two collectives must notice, too
        ("grpc.http2.max_pings_without_data", 0),  # the default stops pinging after two while no data flows
    ]


def _sizes(limits: Limits) -> list[tuple[str, int]]:
    return [
        # the default refuses 4 MiB and more; without any limit a stranger decides how much is allocated
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
    ]


# See [Note: flow control of grpcio].
_FRAME_BYTES = 4 * 1024 * 1024
_WINDOW_BYTES = 16 * 1024 * 1024


def _flow_control() -> list[tuple[str, int]]:
    return [
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def channel_options(timeouts: Timeouts, limits: Limits) -> Options:
    """Options of a channel that this process opens."""
    return [
        *_keepalive(timeouts),
        *_sizes(limits),
        *_flow_control(),
        # A connection of its own for each channel: ranks of one process that call the same address would otherwise
        # share one TCP connection, and a failure of one rank's channel would break the others'.
        ("grpc.use_local_subchannel_pool", 1),
        # Peers come and go within seconds. The defaults wait up to 120 s between two tries, 20 s for a host that drops
        # packets and 30 s until a name that was unknown is looked up again.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.min_reconnect_backoff_ms", _ms(HANDSHAKE_S)),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.enable_retries", 0),  # streams have state: their owner decides on retries; also saves gRPC's copy of sent messages
        ("grpc.enable_http_proxy", 0),  # an http_proxy variable is meant for the web, not for workers
    ]


def server_options(timeouts: Timeouts, limits: Limits, *, leases: bool = True) -> Options:
    """Options of the one server that a worker or the rendezvous runs.

    leases  whether a call means that its caller lives, so that its failure must be noticed at once: calls of workers to the rendezvous, or,
            where there is none, to each other (vigil.py). Otherwise the callers are tools, and peers that this process calls itself
            (pulse.py); and a ping to each watcher every second would cost more than all the statistics that it gets
    """
    return [
        *_keepalive(timeouts, 0 if leases else ONLOOKER_PING_MS),
        *_sizes(limits),
        *_flow_control(),
        # a default server answers pings this frequent with GOAWAY too_many_pings
        ("grpc.http2.min_ping_interval_without_data_ms", _ping_interval_ms(timeouts) // 2),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_S)),  # otherwise silent connections stay for ever
        ("grpc.so_reuseport", 0),  # otherwise a second server binds the same port silently, and each gets half of the calls
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _ping_interval_ms(timeouts: Timeouts) -> int:
    """Half the time after which silence is suspect: a frozen peer is noticed within 1.5 times `suspect_s`.

    gRPC itself pings at most once a second, so that below 2 s of `suspect_s` noticing takes up to 1 s + `suspect_s`.
    """
    return max(2, _ms(timeouts.suspect_s) // 2)
