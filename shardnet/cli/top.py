"""`shardnet top`: a cluster, live."""

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardnet.cli import arguments
from shardnet.cli.protection import Protection
from shardnet.credentials import Role, Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.observation.follower import Follower
from shardnet.observation.observer import Observer
from shardnet.observation.views import ClusterView

if TYPE_CHECKING:
    from shardnet.observation.chronicle import Chronicle
    from shardnet.observation.rates import RateMeter

ANSWER_S = 2.0
WIDTH = 160  # if there is no terminal
LEAST_EVENTS = 3  # shown in any case, however many workers there are
DESCRIPTION = """\
Show the cluster and its workers live, every second by default: steps, loss, rates, which workers wait and which are waited for, and
events. If the rendezvous goes away, its workers are still asked. Ctrl-C ends it. Without a terminal, each picture is printed below the
last.
"""
EPILOG = """\
examples:
  shardnet top 127.0.0.1:7000
  shardnet top 10.0.0.1:7000 --certs cluster/alice --interval 5
"""
Show = Callable[[ClusterView, "RateMeter", "Chronicle"], None]


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser("top", help="watch a cluster live", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("address", type=arguments.address, metavar="ADDRESS", help="HOST:PORT of a rendezvous or a worker")
    parser.add_argument(
        "--interval", type=arguments.interval, metavar="S", default=1.0, help="seconds from one picture to the next (default: %(default)g)"
    )
    parser.add_argument("--count", type=arguments.positive, metavar="N", help="stop after N pictures")
    Protection.add_to(parser)
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Raises EndpointUnavailable, HandshakeError or ProtocolError if the first look fails."""
    from rich.console import Console  # here: no other command waits for it
    from rich.live import Live

    from shardnet.cli.screen import draw

    security = Protection.of(options).security(Role.OPERATOR)
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else WIDTH)
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if is_terminal else None

        def show(view: ClusterView, meter: "RateMeter", chronicle: "Chronicle") -> None:
            if live is not None:
                room = console.height - 8 - sum(5 + len(job.workers) for job in view.jobs)
                live.update(draw(view, meter, list(chronicle.events)[-max(LEAST_EVENTS, room) :]), refresh=True)
            else:
                console.print(draw(view, meter, chronicle.take_new()), end="\n\n")

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(security, options, show))
    return 0


async def _follow(security: Security, options: arguments.Arguments, show: Show) -> None:
    async with Follower(security, options.interval, ANSWER_S) as follower:
        await watch(Observer(security, ANSWER_S, follower.ask), options.address, options.interval, options.count, show)


async def watch(observer: Observer, address: str, interval_s: float, count: int | None, show: Show) -> None:
    """Look repeatedly, and show each view. Raises like `Observer.look` if the first look fails."""
    from shardnet.observation.chronicle import Chronicle
    from shardnet.observation.rates import RateMeter

    meter, chronicle = RateMeter(), Chronicle()
    view = await observer.look(address)
    for number in itertools.count(1):
        begin_s = time.monotonic()
        meter.add(begin_s, view)
        chronicle.add(time.time(), view)
        show(view, meter, chronicle)
        if number == count:
            return
        await asyncio.sleep(max(0.0, begin_s + interval_s - time.monotonic()))
        try:
            view = await observer.look(address)
        except (EndpointUnavailable, HandshakeError, ProtocolError):
            view = await observer.look_again(view)
