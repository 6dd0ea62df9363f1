"""`shardnet demo`: train a small language model on this machine and show the result."""

from pathlib import Path

from shardnet.cli import arguments
from shardnet.cli.launch.job import Job
from shardnet.cli.programs import find
from shardnet.cli.run import run_job

PROGRAM = "workers/train_lm.py"
REPORT = "report.html"
DESCRIPTION = """\
Train a small byte-level language model, sharded over N workers of this machine, on the text of Python's standard
library. It trains for about two minutes, prints a sample of generated text, and writes a report page.
"""
EPILOG = """\
examples:
  shardnet demo
  shardnet demo --nproc 4 --steps 50
      options that the demo does not have are passed to workers/train_lm.py;
      'shardnet run workers/train_lm.py --help' lists them
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small language model on this machine",
        usage="shardnet demo [--nproc N] [--out DIR] [OPTIONS OF workers/train_lm.py]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--nproc", type=arguments.positive, default=2, metavar="N", help="number of workers (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="where the report and the trace go (default: %(default)s)"
    )
    parser.set_defaults(execute=execute, passes_on=True)


def execute(options: arguments.Arguments) -> int:
    """Raises UsageError if the training program is not found."""
    program = find(PROGRAM)
    out: Path = options.out.absolute()
    code = run_job(Job(target=str(program), arguments=("--out", str(out), *options.unknown), nproc=options.nproc, name="demo"))
    report = out / REPORT
    if code == 0 and report.exists():
        print(f"\nThe report of this run, to open in a browser: {report.as_uri()}")
    return code
