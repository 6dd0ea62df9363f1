"""`shardnet doctor`: finds what may keep a cluster from working, or from being fast, and says what to do about it."""

import asyncio
import json
import os
import textwrap
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardnet.cli import arguments
from shardnet.cli.protection import Protection
from shardnet.credentials import Role
from shardnet.errors import CredentialsError, UsageError

if TYPE_CHECKING:
    from shardnet.doctor import Finding

ANSWER_S, WAIT_S = 5.0, 120.0
WIDTH = 120
DESCRIPTION = """\
Check this machine and, with --rendezvous, the way to it. With --workers N, run it on all N machines at the same time, with the same
arguments: they meet at the rendezvous and measure the links between them.
It changes nothing and disturbs no training. The exit status is 1 if there are problems, and 0 if there are at most warnings.
"""
EPILOG = """\
examples:
  shardnet doctor
  shardnet doctor --rendezvous 10.0.0.1:7000 --certs cluster/node-0
  shardnet doctor --rendezvous 10.0.0.1:7000 --certs cluster/node-0 --workers 4
      on each of four machines
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="look for what keeps a cluster from working, or from being fast", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "--rendezvous",
        type=arguments.address,
        metavar="HOST:PORT",
        default=os.environ.get("SHARDNET_RENDEZVOUS") or None,
        help="a running rendezvous (default: $SHARDNET_RENDEZVOUS)",
    )
    parser.add_argument(
        "--workers",
        type=arguments.positive,
        metavar="N",
        help="measure the links between N machines that all run this command, this one included",
    )
    parser.add_argument(
        "--job",
        type=arguments.name,
        metavar="ID",
        help="job that you will run (default: the certificate's job, or 'default')",
    )
    parser.add_argument("--listen", type=arguments.host, metavar="HOST", help="address that workers of this machine will listen on")
    parser.add_argument(
        "--wait", type=arguments.seconds, metavar="S", default=WAIT_S, help="seconds to wait for the other machines (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    Protection.add_to(parser)
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Raises UsageError."""
    if options.workers is not None and (options.workers < 2 or options.rendezvous is None):
        raise UsageError("--workers N needs at least two machines, and --rendezvous HOST:PORT, at which they meet")
    return asyncio.run(_examine(options))


async def _examine(options: arguments.Arguments) -> int:
    found: list[Finding] = []
    async for finding in _findings(options):
        found.append(finding)
        if not options.json:
            print(_as_text(finding), flush=True)  # each at once: the last ones take a while
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    return int(any(finding.level == "problem" for finding in found))


async def _findings(options: arguments.Arguments) -> "AsyncIterator[Finding]":
    from shardnet.doctor import about_machine, about_peers, about_rendezvous, about_trust  # imported here, because they import torch

    protection = Protection.of(options)
    for finding in await about_machine(options.listen or ""):
        yield finding
    for finding in about_trust(insecure=protection.insecure, certs=protection.certs, token=protection.token, job=options.job):
        yield finding
    if options.rendezvous is None:
        return
    try:
        security = protection.security(Role.WORKER)
    except CredentialsError:  # `about_trust` has reported it already
        return
    reached = await about_rendezvous(options.rendezvous, security, ANSWER_S)
    for finding in reached:
        yield finding
    if options.workers is not None and not any(finding.level == "problem" for finding in reached):
        settings = {"rendezvous": options.rendezvous, "listen": options.listen or "", **protection.settings}
        identity = None if security.credentials is None else security.credentials.identity
        job = options.job or (identity and identity.job) or "default"
        for finding in await about_peers(options.workers, job=job, wait_s=options.wait, **settings):
            yield finding


def _as_text(finding: "Finding") -> str:
    lines = [f"{finding.level:8} {finding.topic:14} {finding.what}"]
    lines += textwrap.wrap(finding.advice, WIDTH - 24, initial_indent=" " * 24, subsequent_indent=" " * 24) if finding.advice else []
    return "\n".join(lines)
