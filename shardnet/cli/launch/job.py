"""`Job`: what one `shardnet run` starts on this machine."""

import os
import sys
from dataclasses import dataclass
from enum import StrEnum

from shardnet.cli.protection import NO_PROTECTION, Protection
from shardnet.errors import UsageError


class StartMethod(StrEnum):
    """How workers are started."""

    FORKSERVER = "forkserver"  # forked from one process that has imported torch and shardnet
    SPAWN = "spawn"  # each as an interpreter of its own

    @classmethod
    def default(cls) -> "StartMethod":
        """Fork on Linux from version 5.3 on: there libraries can be forked, and the system can wait for another process's child."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            return cls.SPAWN
        return cls.FORKSERVER


DEFAULT_START_METHOD = StartMethod.default()


@dataclass(frozen=True, slots=True)
class Job:
    """A program and how many workers run it, checked when it is made.

    target       path of a script, or the name of a module if `is_module`
    arguments    the program's arguments, unchanged
    nproc        workers on this machine
    nnodes       machines, each with its own launcher and the same nproc
    node_rank    0-based number of this machine among them, which orders the ranks; None: ordered by arrival
    rendezvous   host:port of a running rendezvous; None starts one here
    name         id of the job at the rendezvous; the same on all machines
    node         this machine's name; None leaves it to the workers
    listen       host on which the workers listen; None leaves it to them
    protection   of the connections on this machine and to and from others
    trace        where the workers write a trace; None: nowhere
    web          host:port of the page of a rendezvous that is started here; None: nowhere
    min_workers  workers, over all machines, with which the program goes on when others have died; None: all
    restarts     replacements for workers of this machine that have died; None: 0. The job is elastic if either is given
    grace_s      how long the other workers have to leave when one has failed, before they are killed
    start_method how they begin
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    name: str = "default"
    node: str | None = None
    listen: str | None = None
    protection: Protection = NO_PROTECTION
    trace: str | None = None
    web: str | None = None
    min_workers: int | None = None
    restarts: int | None = None
    grace_s: float = 5.0
    start_method: StartMethod = DEFAULT_START_METHOD

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1:
            raise UsageError(f"a job needs at least one worker and one node, got nproc={self.nproc} and nnodes={self.nnodes}")
        if self.grace_s < 0:
            raise UsageError(f"the grace period must not be negative, got {self.grace_s} s")
        if self.nnodes > 1 and self.rendezvous is None:
            raise UsageError(f"{self.nnodes} nodes need --rendezvous HOST:PORT to find each other; start one with 'shardnet rendezvous'")
        if self.web is not None and self.rendezvous is not None:
            raise UsageError(
                f"--web is for a run that starts its own rendezvous, but this one uses the rendezvous at {self.rendezvous}; "
                "leave out --web, and give it to the 'shardnet rendezvous' that listens there"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"--node-rank must be from 0 to {self.nnodes - 1} with {self.nnodes} nodes, got {self.node_rank}")
        if not 1 <= self.least_workers <= self.world_size:
            raise UsageError(
                f"a job of {self.world_size} workers (nproc={self.nproc} times nnodes={self.nnodes}) cannot go on with {self.min_workers}; "
                f"give --min-workers a number from 1 to {self.world_size}"
            )
        if self.restarts is not None and self.restarts < 0:
            raise UsageError(f"the number of restarts must not be negative, got {self.restarts}")

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def elastic(self) -> bool:
        """Whether its program can go on when a worker has died."""
        return self.min_workers is not None or self.restarts is not None

    @property
    def least_workers(self) -> int:
        return self.world_size if self.min_workers is None else self.min_workers

    @property
    def least_workers_here(self) -> int:
        """How many of the least workers this machine must have even if no other machine has lost one."""
        return max(0, self.least_workers - (self.world_size - self.nproc))

    @property
    def command(self) -> tuple[str, ...]:
        """One worker's command line. `-u`: what a worker prints must be seen even if it is killed the moment after."""
        module = ("-m",) if self.is_module else ()
        return (sys.executable, "-u", *module, self.target, *self.arguments)
