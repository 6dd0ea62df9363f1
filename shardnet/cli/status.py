"""`shardnet status`: shows which workers are in the cluster, and how each of them is doing."""

import asyncio

from shardnet.cli import arguments
from shardnet.cli.protection import Protection
from shardnet.cli.table import as_json, as_text
from shardnet.credentials import Role
from shardnet.observation.observer import Observer

TIMEOUT_S = 3.0
DESCRIPTION = """\
Ask a rendezvous for its jobs, and all their workers how they are, or ask only one worker, and print the answers.
A worker that does not answer is shown as unreachable, one that has left or died as gone.
The exit status is 1 if nobody answers at ADDRESS.
"""
EPILOG = """\
examples:
  shardnet status 127.0.0.1:7000
  shardnet status 10.0.0.1:7000 --certs cluster/alice --json
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser("status", help="who is in the cluster, and how they are doing", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("address", type=arguments.address, metavar="ADDRESS", help="HOST:PORT of a rendezvous or a worker")
    parser.add_argument("--json", action="store_true", help="print JSON")
    Protection.add_to(parser)
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Raises EndpointUnavailable, HandshakeError or ProtocolError."""
    observer = Observer(Protection.of(options).security(Role.OPERATOR), TIMEOUT_S)
    view = asyncio.run(observer.look(options.address))
    print(as_json(view) if options.json else as_text(view))
    return 0
