"""`shardnet rendezvous`: run the service at which the workers of several machines meet."""

import asyncio
import logging
import signal

from shardnet.address import Address
from shardnet.cli import arguments
from shardnet.credentials import Security
from shardnet.rendezvous.server import RendezvousServer

DEFAULT_LISTEN = "127.0.0.1:7000"
DESCRIPTION = """\
Run a rendezvous in the foreground: the one place that workers of all machines must be able to call. It gives them their
ranks and tells them who else is there; training data does not pass through it. Ctrl-C ends it.
"""
EPILOG = """\
examples:
  shardnet rendezvous
      for workers of this machine, on 127.0.0.1:7000
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
    parser.add_argument("--insecure", action="store_true", help="allow unencrypted connections from other machines")
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Serve until SIGINT or SIGTERM. Raises ListenError, or PlaintextRefused for another machine's sake."""
    logging.getLogger("shardnet.rendezvous").setLevel(logging.INFO)
    return asyncio.run(_serve(options.listen, insecure=options.insecure))


async def _serve(listen: str, *, insecure: bool) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with RendezvousServer(listen, security=Security(insecure=insecure)) as server:
        print(_welcome(server.address, insecure=insecure), flush=True)
        await stopped.wait()
    print("rendezvous: closed", flush=True)
    return 0


def _welcome(address: str, *, insecure: bool) -> str:
    parsed = Address.parse(address)
    reachable = f"THIS-MACHINE:{parsed.port}" if parsed.is_unspecified else address
    flag = " --insecure" if insecure else ""
    return (
        f"rendezvous: listening on {address}; Ctrl-C ends it\n"
        f"rendezvous: on each of M machines: shardnet run --nproc N --nnodes M --rendezvous {reachable}{flag} SCRIPT\n"
        f"rendezvous: who is there:          shardnet status {reachable}{flag}"
    )
