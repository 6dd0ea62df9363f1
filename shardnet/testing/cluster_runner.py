"""`ClusterRunner`: the object that the fixture `cluster` gives."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardnet.config import Timeouts
from shardnet.errors import UsageError
from shardnet.settings import Settings
from shardnet.testing.cluster_run import ClusterRun, Worker
from shardnet.testing.fault import Action
from shardnet.testing.faults import Faults
from shardnet.testing.meeting import Meeting
from shardnet.testing.news import News
from shardnet.testing.nursery import Nursery
from shardnet.testing.part import Part
from shardnet.testing.process_worker import ProcessWorker
from shardnet.testing.relays import Relays
from shardnet.testing.thread_worker import ThreadWorker

_OWN = {"rendezvous", "job", "min_world_size", "max_world_size", "elastic", "local_rank", "node", "replacement"}


class ClusterRunner:
    """Runs training functions on clusters of this machine; close it to end the process that forks workers."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    def run(
        self,
        train: Callable[..., Any],
        world_size: int,
        *,
        args: Sequence[Any] = (),
        processes: bool = False,
        nodes: int | None = None,
        elastic: bool = False,
        min_workers: int = 1,
        every: int = 1,
        faults: Faults | None = None,
        timeout_s: float = 60.0,
        **settings: Any,
    ) -> list[Any]:
        """Let `world_size` ranks train, and wait until all have ended; returns their results, by rank.

        train        `train(cluster, *args)`, or `train(cluster, state, *args)` if elastic; a coroutine function or a usual one. Each rank
                     calls it on a thread with an event loop of its own, so it may block
        processes    each rank is a process, not a thread of this one: it has its own imports, seeds and settings, and it can be killed.
                     Then `train` must be defined at the top of a module, and `args` and results must be tensors, numbers, text and
                     containers of these
        nodes        on how many nodes the ranks believe to be, the same number of ranks on each; default: 1, or if the faults concern
                     links, one for each rank, because on one node data goes through memory and not over links
        elastic      run through `shardnet.elastic.run`: the others go on when a worker is lost, if at least `min_workers` are left;
                     `every` is an argument of that function
        faults       the faults that should happen
        timeout_s    for all ranks together: a rank that has not ended by then has failed
        settings     of `shardnet.connect`; `timeouts` are short unless given

        The result of a worker that was killed by order is None; those of workers that joined by order come last. The output of processes is
        printed here when all have ended.

        Raises RanksFailed if ranks raise, die without an order, or do not end in time, FaultNotFired if all goes well but an ordered fault
        did not happen, and UsageError for a call that makes no sense. In any case nothing is left running, except a thread that is stuck in
        its own code.
        """
        __tracebackhide__ = True
        faults = Faults() if faults is None else faults
        _check_kinds(args, faults, world_size, timeout_s)
        nodes = nodes if nodes is not None else world_size if faults.on_links else 1
        _check(world_size, nodes, processes, elastic, faults)
        _check_elastic(world_size, elastic, min_workers, every)
        if own := _OWN.intersection(settings):
            raise UsageError(f"the settings must not include {', '.join(sorted(own))}: run() sets these itself, from its other arguments")
        Settings.check_names(settings)
        if processes:
            self.warm_up()  # `timeout_s` does not count this
        with ExitStack() as stack:
            relays = Relays(world_size if faults.on_links else 0)
            stack.callback(relays.close)
            meeting = stack.enter_context(Meeting(world_size))
            part = Part(train, tuple(args), settings, every if elastic else 0)
            part.settings.setdefault("timeouts", Timeouts.for_tests())
            part.settings.update(
                rendezvous=meeting.address,
                job="test",
                min_world_size=min_workers if elastic else world_size,
                max_world_size=world_size + faults.joiners,
                elastic=elastic,
            )
            orders = dict(enumerate(faults.orders))

            def start(number: int, tell: Callable[[News], None]) -> Worker:
                """Joiners are on nodes of their own, if there are several, and have no relay."""
                node = f"node {number * nodes // world_size}"
                mine = {**part.settings, "local_rank": number, "node": node, **relays.settings(number)}
                theirs = orders if number < world_size else {}
                if processes:
                    return ProcessWorker(number, replace(part, settings=mine), theirs, tell, self._forks())
                return ThreadWorker(number, replace(part, settings=mine), theirs, tell)

            return ClusterRun(start, world_size, orders, relays, meeting).run(timeout_s)

    def warm_up(self) -> None:
        """Start the process that forks workers, which takes some seconds; otherwise the first run with `processes` does it."""
        self._forks().wait_until_ready()

    def close(self) -> None:
        """End the process that forks others, if there is one."""
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()

    def _forks(self) -> Nursery:
        if self._nursery is not None and self._nursery.ended:  # killed, with all processes that it had forked
            self.close()
        if self._nursery is None:
            self._nursery = Nursery("shardnet.testing.process", cwd=Path.cwd())
        return self._nursery


def _check(world_size: int, nodes: int, processes: bool, elastic: bool, faults: Faults) -> None:
    if not 1 <= nodes <= world_size or world_size % nodes:
        raise UsageError(f"{world_size} ranks cannot be spread evenly over {nodes} nodes")
    if faults.joiners and not elastic:
        raise UsageError("workers can join only an elastic run; give elastic=True")
    for fault in faults.orders:
        if fault.rank >= world_size:
            raise UsageError(f"there is no rank {fault.rank} among {world_size} ranks: {fault}")
        if fault.action is Action.FREEZE and not processes:
            raise UsageError(f"only a process can be frozen, so processes=True is needed: {fault}")


def _check_elastic(world_size: int, elastic: bool, min_workers: int, every: int) -> None:
    if not elastic and (min_workers, every) != (1, 1):
        raise UsageError("min_workers and every are for elastic runs only; give elastic=True, too")
    if not 1 <= min_workers <= world_size:
        raise UsageError(f"min_workers must be from 1 to {world_size}, the number of ranks that begin, got {min_workers}")
    if every < 1:
        raise UsageError(f"every must be at least 1 step, got {every}")


def _check_kinds(args: Sequence[Any], faults: Faults, world_size: Any, timeout_s: float) -> None:
    if not isinstance(args, list | tuple):
        raise UsageError(f"args must be a tuple or list of further arguments of the function, got {args!r}")
    if not isinstance(faults, Faults):
        raise UsageError(f"faults must be a Faults, such as Faults().kill(...), got {faults!r}")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise UsageError(f"world_size must be a number of ranks, at least 1, got {world_size!r}")
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"timeout_s must be a finite number of seconds above 0, got {timeout_s}")
