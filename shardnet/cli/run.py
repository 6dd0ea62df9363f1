"""`shardnet run`: start a program as the workers of this machine."""

import argparse
import asyncio
import functools
import os
import secrets
from pathlib import Path

from shardnet.address import Address
from shardnet.cli import arguments
from shardnet.cli.launch.console import Console
from shardnet.cli.launch.environment import worker_environment
from shardnet.cli.launch.job import DEFAULT_START_METHOD, Job, StartMethod
from shardnet.cli.launch.launcher import launch
from shardnet.cli.protection import Protection
from shardnet.cli.services import local_rendezvous, worker_stats
from shardnet.credentials import Identity, Role
from shardnet.errors import CredentialsError, UsageError
from shardnet.process import allow_many_files
from shardnet.scheduler import Task
from shardnet.settings import Settings

_TO_COME = "127.0.0.1:1"  # stands for a rendezvous that is not there yet

DESCRIPTION = """\
Start N workers (--nproc N) on this machine, show their output with rank prefixes, and end all of them when one fails.

With --min-workers or --restarts the other workers go on, as long as enough are left: the program must be one that continues
without a dead worker, or with a new one in its place (see 'shardnet.elastic'). Such a run succeeds if at least one worker of this
machine does; its last line then says which were lost.

The first Ctrl-C or SIGTERM is passed on to the workers, which close their cluster and leave; the second kills them.
The exit status is that of the worker whose failure ended the run (128 + n if signal n killed it), 130 after Ctrl-C.
"""
EPILOG = """\
examples:
  shardnet run --nproc 2 train.py --steps 100
      two workers on this machine; everything after the script is passed to it
  shardnet run --nproc 4 -m my_project.train -- --help
      a module; '--' is optional
  shardnet run --nproc 4 --min-workers 2 --restarts 3 train.py
      continues while at least two workers are left; the first three that die are replaced
  shardnet run --web --nproc 4 train.py
      shows the workers on a live page at http://127.0.0.1:7080/
  shardnet run --nproc 2 --nnodes 3 --rendezvous 10.0.0.1:7000 --listen 10.0.0.2 --certs node-2 train.py
      one of three machines with two workers each; the rendezvous was started with
      'shardnet rendezvous --listen 10.0.0.1:7000 --certs cluster/rendezvous' (see 'shardnet certs --help')
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="start a program as the workers of this machine",
        usage="shardnet run [options] (SCRIPT | -m MODULE) [--] [ARGS ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--nproc", type=arguments.positive, default=1, metavar="N", help="workers on this machine (default: 1)")
    parser.add_argument("--nnodes", type=arguments.positive, default=1, metavar="M", help="machines that run this command (default: 1)")
    parser.add_argument(
        "--node-rank",
        type=arguments.whole,
        metavar="K",
        help="number of this machine among the M, from 0: its workers get ranks K*N, K*N+1, ... (default: what the scheduler says, such as "
        "Slurm's srun or a Kubernetes Indexed Job, if it started this command M times; otherwise the order of arrival)",
    )
    parser.add_argument(
        "--rendezvous",
        type=arguments.address,
        metavar="HOST:PORT",
        help="rendezvous where the machines meet (default: one started here, for this run only)",
    )
    parser.add_argument(
        "--job",
        type=arguments.name,
        metavar="ID",
        help="job of the rendezvous to join (default: the certificate's job; without one, 'default' if M > 1, and a new job otherwise)",
    )
    parser.add_argument(
        "--node",
        type=arguments.name,
        metavar="NAME",
        help="name of this machine (default: one made from its host name and boot id)",
    )
    parser.add_argument(
        "--listen",
        type=arguments.host,
        metavar="HOST",
        help="address of this machine that the other machines connect to (default: the one from which it reaches the rendezvous)",
    )
    Protection.add_to(parser)
    parser.add_argument(
        "--grace",
        type=arguments.seconds,
        default=5.0,
        metavar="SECONDS",
        help="when a worker has failed, how long the others have to leave before they are killed (default: %(default)g)",
    )
    parser.add_argument(
        "--min-workers",
        type=arguments.positive,
        metavar="N",
        help="continue when workers have died, as long as N are left over all machines (default: all are needed)",
    )
    parser.add_argument(
        "--restarts",
        type=arguments.whole,
        metavar="N",
        help="replace dead workers of this machine by new ones, at most N times in total (default: 0)",
    )
    parser.add_argument(
        "--start-method",
        choices=list(StartMethod),
        default=DEFAULT_START_METHOD,
        help="how workers start: forkserver forks them from one process that has imported torch and shardnet, so both are in memory only "
        "once; spawn starts a new interpreter for each (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="write a timeline of all workers to PATH, for https://ui.perfetto.dev (with --nnodes: give it on every machine)",
    )
    arguments.add_web_to(parser, before="SCRIPT")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program to run (with -m: a module)")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the program")
    rest.required = False  # otherwise argparse would report it as missing, too, not only SCRIPT
    parser.set_defaults(execute=execute)


def execute(options: arguments.Arguments) -> int:
    """Raises UsageError for a script that is not there, for unusable certificates, or for addresses that other machines reach without
    protection."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory, in which workers start, does not exist any more; change to another one") from None
    if not options.module and not Path(options.script).exists():
        raise UsageError(f"there is no file {options.script!r}; to run a module, put -m before its name")
    if not options.module and str(Path(options.script).absolute()).startswith(("/dev/fd/", "/dev/stdin", "/proc/")):
        raise UsageError(f"{options.script} is not the same file in each process; put the program into a file that all workers can read")
    protection = Protection.of(options)
    identity = _check(options, protection)
    return run_job(
        Job(
            target=options.script,
            arguments=tuple(options.args),
            is_module=options.module,
            nproc=options.nproc,
            nnodes=options.nnodes,
            node_rank=_node_rank(options),
            rendezvous=options.rendezvous,
            name=options.job or (identity and identity.job) or ("default" if options.nnodes > 1 else f"run-{secrets.token_hex(4)}"),
            node=options.node,
            listen=options.listen,
            protection=protection if options.rendezvous else protection.on_this_machine(),
            min_workers=options.min_workers,
            restarts=options.restarts,
            grace_s=options.grace,
            trace=None if options.trace is None else str(options.trace.absolute()),
            web=options.web,
            start_method=StartMethod(options.start_method),
        )
    )


def _node_rank(options: arguments.Arguments) -> int | None:
    """The number of this machine among several, if anything gives it."""
    given: int | None = options.node_rank
    if given is not None or options.nnodes == 1:
        return given
    task = Task.find(os.environ, options.nnodes)
    return None if task is None else task.rank


def _check(options: arguments.Arguments, protection: Protection) -> Identity | None:
    """The identity of the workers' certificate. Checked here, where an error is one line: each worker would report it with a traceback."""
    security = protection.security(Role.WORKER)
    for given in (options.rendezvous, options.listen and str(Address(options.listen, 0))):
        if given:
            security.check(given)
    identity = None if security.credentials is None else security.credentials.identity
    job = options.job or (identity and identity.job) or "default"
    if identity is not None and options.rendezvous and not identity.may_join(job):
        raise CredentialsError(
            f"the certificate in {protection.certs} is for {identity}, which may not join job {job!r}; "
            "make one that may with `shardnet certs issue --job`, or use another folder"
        )
    return identity


def run_job(job: Job) -> int:
    """Launch in the foreground; returns the exit status. Raises UsageError or AddressError for SHARDNET_* variables that make no sense, and
    PlaintextRefused for one with which workers would listen to other machines without protection."""
    allow_many_files()  # the launcher needs some for each worker, and each worker some for each other worker
    # Read as the first worker will read them. Here an error is one line: each worker would report it with a traceback.
    settings = Settings.from_environment(worker_environment(job, 0, job.rendezvous or _TO_COME))
    if job.nproc > 1 and settings.has_fixed_port:
        raise UsageError(
            f"SHARDNET_LISTEN or SHARDNET_ADVERTISE fixes one port for {job.nproc} workers of this machine; set only a host, or start one "
            "worker with --nproc 1"
        )
    if settings.listen:
        job.protection.security(Role.WORKER).check(settings.given_listen_address)
    ask = functools.partial(worker_stats, security=job.protection.security(Role.OPERATOR))
    with Console() as console:
        security = job.protection.security(Role.RENDEZVOUS)
        return asyncio.run(launch(job, console, lambda: local_rendezvous(security, job.web, console.say), ask))
