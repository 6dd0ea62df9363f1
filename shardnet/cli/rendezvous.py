"""`shardnet rendezvous`: run the service at which the workers of several machines meet."""

import asyncio
import logging
import signal
from pathlib import Path

from shardnet.address import Address
from shardnet.cli import arguments
from shardnet.cli.protection import Protection
from shardnet.cli.services import with_page
from shardnet.credentials import Role, Security
from shardnet.errors import CredentialsError
from shardnet.process import allow_many_files
from shardnet.rendezvous.server import RendezvousServer
from shardnet.rendezvous.store import NoStore, SqliteStore, Store

DEFAULT_LISTEN = "127.0.0.1:7000"
DESCRIPTION = """\
Run a rendezvous in the foreground: the one place that workers of all machines must be able to call. It gives them their
ranks and tells them who else is there; training data does not pass through it. Ctrl-C ends it.
"""
EPILOG = """\
examples:
  shardnet rendezvous
      for workers of this machine, on 127.0.0.1:7000
  shardnet rendezvous --listen 10.0.0.1:7000 --certs cluster/rendezvous
      for workers of other machines, with certificates: see 'shardnet certs --help'
  shardnet rendezvous --listen 10.0.0.1:7000 --certs cluster/rendezvous --state rendezvous.db
      can be killed and started again while jobs run
  shardnet rendezvous --listen 10.0.0.1:7000 --certs cluster/rendezvous --metrics 127.0.0.1:9464
      with statistics of its jobs for a Prometheus on the same machine
  shardnet rendezvous --web
      shows its cluster on a live page at http://127.0.0.1:7080/
  shardnet rendezvous --listen 10.0.0.1:7000 --insecure
      for workers of a network that you trust: connections are neither encrypted nor authenticated
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser("rendezvous", help="run the service at which machines meet", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--listen",
        type=arguments.listen_address,
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="address to listen on; port 0 lets the system choose (default: %(default)s)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="keep all jobs and their members in this SQLite file, and in FILE-wal beside it while it is open, so that a rendezvous that "
        "died can be started again while jobs run; their workers reconnect by themselves (default: keep nothing)",
    )
    parser.add_argument(
        "--metrics",
        type=arguments.listen_address,
        metavar="HOST:PORT",
        help="serve statistics for Prometheus at http://HOST:PORT/metrics, without encryption (default: off)",
    )
    arguments.add_web_to(parser)
    parser.add_argument(
        "--until-done",
        action="store_true",
        help="exit with status 0 when a training has finished and no job has workers left; lost workers do not count as finished "
        "(default: keep running)",
    )
    parser.add_argument("--reflection", action="store_true", help="enable gRPC server reflection, for tools such as grpcurl")
    Protection.add_to(parser)
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Serve until SIGINT or SIGTERM, or the end of a training. Raises ListenError, PlaintextRefused for an unprotected address that other
    machines reach, or UsageError for an unusable state file or for an extra that is not installed."""
    logging.getLogger("shardnet.rendezvous").setLevel(logging.INFO)
    protection = Protection.of(options)
    security = _as_rendezvous(protection)
    store = NoStore() if options.state is None else SqliteStore(options.state)
    allow_many_files()  # it needs three for each worker
    return asyncio.run(_serve(options, protection, security, store))


def _as_rendezvous(protection: Protection) -> Security:
    security = protection.security(Role.RENDEZVOUS)
    if security.credentials is not None and security.credentials.identity.role is not Role.RENDEZVOUS:
        raise CredentialsError(
            f"the certificate in {protection.certs} is for {security.credentials.identity}, which no worker accepts as a rendezvous; "
            "use the folder 'rendezvous' that `shardnet certs init` has made, or make one with `shardnet certs issue --rendezvous`"
        )
    return security


async def _serve(options: arguments.Arguments, protection: Protection, security: Security, store: Store) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    server = RendezvousServer(
        options.listen,
        security=security,
        store=store,
        reflection=options.reflection,
        metrics=options.metrics or "",
        on_done=stopped.set if options.until_done else None,
    )
    async with with_page(server, options.web, security) as page:
        print(_welcome(server.address, protection), flush=True)
        if server.metrics:
            print(f"rendezvous: metrics at {server.metrics}", flush=True)
        if page:
            print(f"rendezvous: page at {page}", flush=True)
        await stopped.wait()
    print("rendezvous: closed", flush=True)
    return 0


def _welcome(address: str, protection: Protection) -> str:
    parsed = Address.parse(address)
    reachable = f"THIS-MACHINE:{parsed.port}" if parsed.is_unspecified else address
    flag = protection.flags
    return (
        f"rendezvous: listening on {address}; Ctrl-C ends it\n"
        f"rendezvous: on each of M machines: shardnet run --nproc N --nnodes M --rendezvous {reachable}{flag} SCRIPT\n"
        f"rendezvous: who is there:          shardnet status {reachable}{flag}"
    )
