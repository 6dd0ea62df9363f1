"""`Job`: what one `shardnet run` starts on this machine."""

import sys
from dataclasses import dataclass

from shardnet.cli.protection import NO_PROTECTION, Protection
from shardnet.errors import UsageError


@dataclass(frozen=True, slots=True)
class Job:
    """A program and how many workers run it, checked when it is made.

    target      path of a script, or the name of a module if `is_module`
    arguments   what the program gets, untouched
    nproc       workers on this machine
    nnodes      machines, each with its own launcher and the same nproc
    rendezvous  host:port of a running rendezvous; None starts one here
    name        id of the job at the rendezvous; equal on all machines
    node        what this machine calls itself; None leaves it to the workers
    listen      host that the workers listen on; None leaves it to them
    protection  of the connections, to and from other machines and here
    trace       where the workers write a trace; None: nowhere
    grace_s     how long the other workers have to leave when one has failed, before they are killed
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int = 1
    nnodes: int = 1
    rendezvous: str | None = None
    name: str = "default"
    node: str | None = None
    listen: str | None = None
    protection: Protection = NO_PROTECTION
    trace: str | None = None
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1:
            raise UsageError(f"a job needs at least one worker and one node, got nproc={self.nproc} and nnodes={self.nnodes}")
        if self.grace_s < 0:
            raise UsageError(f"the grace must not be negative, got {self.grace_s} s")
        if self.nnodes > 1 and self.rendezvous is None:
            raise UsageError(f"{self.nnodes} nodes need --rendezvous HOST:PORT to find each other; start one with 'shardnet rendezvous'")

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    @property
    def command(self) -> tuple[str, ...]:
        """One worker's command line. `-u`: what a worker prints must be seen even if it is killed the moment after."""
        module = ("-m",) if self.is_module else ()
        return (sys.executable, "-u", *module, self.target, *self.arguments)
