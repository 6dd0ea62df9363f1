"""The `shardnet` command: finds the subcommand, and turns errors into one line and an exit status.

Exit statuses: 0 success, 1 failure, 2 wrong command line, 128 + n signal n; `run` returns that of its worker.
"""

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from shardnet.address import Address
from shardnet.cli import bench, certs, checkpoint, demo, doctor, plan, rendezvous, run, status, top
from shardnet.cli.arguments import Arguments, Parser
from shardnet.errors import AddressError, PlaintextRefused, ShardnetError, UsageError
from shardnet.version import VERSION

_STDOUT, _STDERR = 1, 2
_ADVICE = {  # what to do about errors of the system
    errno.EMFILE: "; raise the limit on open files (ulimit -n)",
    errno.EAGAIN: "; raise the limit on processes (ulimit -u, or that of the container)",
}
COMMANDS = (
    run,
    demo,
    rendezvous,
    status,
    top,
    doctor,
    checkpoint,
    certs,
    plan,
    bench,
)  # each has add_to(commands), and --help lists them in this order

DESCRIPTION = "Sharded training of PyTorch models over any network that lets gRPC through."
EPILOG = """\
examples:
  shardnet demo                            train a small language model on this machine
  shardnet run --nproc 2 train.py          start two workers here
  shardnet status 127.0.0.1:7000           who is in the cluster
  shardnet plan --parameters 7B --layers 32 --world 8
                                           what each strategy would need

'shardnet COMMAND --help' says more about each.
"""


def build_parser() -> Parser:
    """The parser of the whole command line. The arguments that it returns have `execute`, the function to call with them."""
    parser = Parser(prog="shardnet", description=DESCRIPTION, epilog=EPILOG)
    parser.set_defaults(passes_on=False)
    parser.add_argument("--version", action="version", version=f"shardnet {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line; exits with status 2 if it is wrong.

    `unknown` holds the arguments that the command does not know, for commands that pass them on to a program of their own.
    """
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    arguments.unknown = unknown
    if unknown and not arguments.passes_on:
        parser.prog += f" {arguments.command}"  # so that the error names the command whose help is needed
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(arguments, unknown)}")
    return arguments


def _meant(arguments: Arguments, unknown: Sequence[str]) -> str:
    """A hint for a forgotten option: commands about one process take its address without an option, other commands after one."""
    if "rendezvous" not in arguments or arguments.rendezvous is not None:
        return ""
    for text in unknown:
        with suppress(AddressError):
            return f"; did you mean --rendezvous {Address.parse(text)}?"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; returns the exit status."""
    _have_streams()
    _tolerate_any_text()
    logging.basicConfig(level=logging.WARNING, format="shardnet: %(message)s")
    arguments = parse(argv)
    try:
        code: int = arguments.execute(arguments)
        sys.stdout.flush()
    except PlaintextRefused as error:
        return _complain(arguments.command, PlaintextRefused(error.problem, allowed_by="--insecure"), 2)
    except UsageError as error:
        return _complain(arguments.command, error, 2)
    except BrokenPipeError:
        return _on_broken_pipe()
    except (ShardnetError, OSError) as error:
        return _complain(arguments.command, error, 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code if code != 128 + signal.SIGPIPE else _on_broken_pipe()


def _complain(command: str, error: Exception, code: int) -> int:
    advice = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    print(f"shardnet {command}: {error}{advice}", file=sys.stderr)
    return code


def _on_broken_pipe() -> int:
    """Nobody reads stdout any more. Without the redirection Python would print an error about that at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _have_streams() -> None:
    """Open closed standard streams on the null device: otherwise the next opened file would get their number, and output would go into
    it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(_STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(_STDERR, "w", closefd=False)


def _tolerate_any_text() -> None:
    """Escape characters that a terminal cannot show: a worker's output must not end the launcher."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
