"""`shardnet certs`: the certificates of a cluster."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.cli import arguments
from shardnet.credentials import Credentials, Identity, Role
from shardnet.errors import UsageError

if TYPE_CHECKING:
    from shardnet.credentials.authority import Authority

RENDEZVOUS = "rendezvous"
DESCRIPTION = """\
Make the certificates by which the processes of a cluster recognise each other; nobody without one gets in.
One machine keeps the authority, which signs them. Each machine with workers gets its own folder, which states the job that they may join.
"""
EPILOG = """\
examples:
  shardnet certs init cluster
      an authority in ./cluster, and cluster/rendezvous for the rendezvous:
      shardnet rendezvous --listen 10.0.0.1:7000 --certs cluster/rendezvous
  shardnet certs issue cluster node-0 --job lm
      cluster/node-0, to be copied to that machine and used there:
      shardnet run --rendezvous 10.0.0.1:7000 --nnodes 2 --certs node-0 train.py
  shardnet certs issue cluster alice --operator
      for a person who only observes: shardnet status 10.0.0.1:7000 --certs cluster/alice
  export SHARDNET_TOKEN=$(shardnet certs token)
      no files at all: every process that is given this token, rendezvous included, makes its own certificate from it
      (or in a file, as containers are given secrets: export SHARDNET_TOKEN_FILE=/run/secrets/shardnet)
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser("certs", help="make the certificates of a cluster", description=DESCRIPTION, epilog=EPILOG)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", dest="verb", required=True)

    init = verbs.add_parser("init", help="make an authority, and a certificate for the rendezvous")
    init.add_argument("folder", type=Path, metavar="DIR", help="folder of the authority; created if missing")
    _add_days(init, "certificate of the rendezvous", 365)
    init.set_defaults(execute=_init)

    issue = verbs.add_parser("issue", help="make a certificate for a machine or a person")
    issue.add_argument("folder", type=Path, metavar="DIR", help="folder of the authority")
    issue.add_argument("name", type=arguments.name, metavar="NAME", help="name of the machine or person; the certificate goes to DIR/NAME")
    what = issue.add_mutually_exclusive_group()
    what.add_argument(
        "--job", type=arguments.name, metavar="ID", default="default", help="the job its workers may join (default: 'default')"
    )
    what.add_argument("--any-job", action="store_true", help="its workers may join any job")
    what.add_argument("--operator", action="store_true", help="for a person or tool that only observes, as 'shardnet status' does")
    what.add_argument("--rendezvous", action="store_true", help="for another rendezvous process")
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        type=arguments.host,
        metavar="HOST",
        help="also write this name or address into the certificate, for tools that check it (shardnet does not); may be repeated",
    )
    _add_days(issue, "certificate", 365)
    issue.set_defaults(execute=_issue)

    show = verbs.add_parser("show", help="say whose certificate a folder has, and until when it is good")
    show.add_argument("folder", type=Path, metavar="DIR", help="folder of one certificate, such as cluster/node-0")
    show.set_defaults(execute=_show)

    token = verbs.add_parser("token", help="print a new join token, for a cluster without certificate files")
    token.set_defaults(execute=_token)


def _add_days(parser: arguments.Parser, what: str, default: int) -> None:
    parser.add_argument(
        "--days", type=arguments.positive, default=default, metavar="N", help=f"how long the {what} is good (default: %(default)s)"
    )


# Modules that need `cryptography` are imported where they are used: all other commands start without it, 0.1 s sooner.


def _init(options: arguments.Arguments) -> int:
    from shardnet.credentials.authority import Authority
    from shardnet.credentials.folder import save, save_authority

    authority = Authority.create()
    credentials = _issued(authority, Identity(Role.RENDEZVOUS, RENDEZVOUS), options.days)
    save_authority(authority, options.folder)
    save(credentials, options.folder / RENDEZVOUS)
    print(f"certs: the authority of a new cluster is in {options.folder}; authority.key can make any certificate, so keep it there")
    print(f"certs: the rendezvous:    shardnet rendezvous --certs {options.folder / RENDEZVOUS} --listen HOST:PORT")
    print(f"certs: for each machine:  shardnet certs issue {options.folder} NAME --job ID")
    return 0


def _issue(options: arguments.Arguments) -> int:
    from shardnet.credentials.authority import expiry
    from shardnet.credentials.folder import load_authority, save

    if "/" in options.name or options.name in (".", ".."):
        raise UsageError(f"NAME must be usable as a folder's name, without '/', and not '.' or '..', got {options.name!r}")
    role = Role.OPERATOR if options.operator else Role.RENDEZVOUS if options.rendezvous else Role.WORKER
    identity = Identity(role, options.name, None if role is not Role.WORKER or options.any_job else options.job)
    folder = options.folder / options.name
    credentials = _issued(load_authority(options.folder), identity, options.days, options.host)
    save(credentials, folder)
    print(f"certs: {folder} is for {identity}, until {expiry(credentials.certificate):%Y-%m-%d}; copy the folder to where it is used")
    return 0


def _issued(authority: "Authority", identity: Identity, days: float, hosts: Sequence[str] = ()) -> Credentials:
    try:
        return authority.issue(identity, days=days, hosts=hosts)
    except (ValueError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot make this certificate: {error}") from error


def _show(options: arguments.Arguments) -> int:
    from shardnet.credentials.authority import expiry
    from shardnet.credentials.folder import load

    credentials = load(options.folder)
    until = expiry(credentials.certificate)
    print(f"{credentials.identity}, until {until:%Y-%m-%d %H:%M} UTC ({(until - datetime.now(UTC)).days} days)")
    return 0


def _token(_: arguments.Arguments) -> int:
    from shardnet.credentials.token import new_token

    print(new_token())
    return 0
