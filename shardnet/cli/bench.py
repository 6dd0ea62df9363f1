"""`shardnet bench`: measure shardnet against torch's own engines."""

import os
import sys

from shardnet.cli import arguments
from shardnet.cli.programs import find

DESCRIPTION = """\
Measure collectives and training steps against torch's gloo and FSDP2, taking turns in one run.
All arguments are passed to 'python -m benchmarks'; 'shardnet bench --help-benchmarks' lists them.
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser("bench", help="measure against torch's gloo and FSDP2", description=DESCRIPTION)
    parser.add_argument("--help-benchmarks", action="store_true", help="list the arguments of 'python -m benchmarks'")
    parser.set_defaults(execute=execute, passes_on=True)


def execute(options: arguments.Arguments) -> int:
    """Replaces this process by the benchmarks, so that a Ctrl-C has one process to end. Raises UsageError if they are not found."""
    home = find("benchmarks/__main__.py").parents[1]
    wanted = ["--help"] if options.help_benchmarks else options.unknown
    path = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *wanted], {**os.environ, "PYTHONPATH": path})
