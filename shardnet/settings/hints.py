"""`Hints`: what a scheduler says of a worker, as far as nobody who has more say does.

[Note: who has the say] Arguments of `connect()` come first, then SHARDNET_* variables, then the scheduler that has started this process
([Note: schedulers] in shardnet/scheduler.py). Without a rendezvous a process is a world of one, whatever a scheduler says. Whoever numbers
workers by `local_rank` does that alone. With a folder of certificates the job is not the scheduler's to name: a certificate is for a
certain one. The node is not either: the host's own identity is right under all of them, and nodes of a scheduler may share a host.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from shardnet.errors import UsageError
from shardnet.scheduler import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hints:
    """Defaults of some settings; those without a scheduler where it has no say.

    world_size_from  the variable that says so, for messages
    """

    world_size: int = 1
    world_size_from: str = "SHARDNET_WORLD_SIZE"
    local_rank: int = 0
    wished_rank: int = -1
    job: str = "default"

    @classmethod
    def find(cls, environment: Mapping[str, str], given: Mapping[str, object], world_size: int) -> Self:
        """See [Note: who has the say]. `given` are arguments of `connect()`; `world_size` is what they or SHARDNET_* variables say of
        the most workers that there may be, 0 for nothing.

        Raises UsageError where a scheduler's word is needed and makes no sense, or is half of what there should be.
        """
        if not _said("rendezvous", environment, given):
            _warn_if_alone(environment)
            return cls()
        task = Task.find(environment, world_size or None)
        if task is None:
            return cls()
        if task.world_size is None and not world_size:
            raise UsageError(
                f"{task.scheduler} has started this process as number {task.rank} of several, but does not say of how many; set "
                "SHARDNET_WORLD_SIZE to the `completions` of the Job"
            )
        numbered = _said("local_rank", environment, given) or _said("wished_rank", environment, given)
        return cls(
            world_size=task.world_size or 1,
            world_size_from=task.world_size_from or "SHARDNET_WORLD_SIZE",
            local_rank=0 if numbered else task.local_rank,
            wished_rank=-1 if numbered else task.rank,
            job="default" if _said("certs", environment, given) or not task.job else task.job,
        )


def _said(name: str, environment: Mapping[str, str], given: Mapping[str, object]) -> bool:
    """Whether an argument or a variable of ours says it; an empty one does not."""
    return given[name] != "" if name in given else bool(environment.get(f"SHARDNET_{name.upper()}"))


def _warn_if_alone(environment: Mapping[str, str]) -> None:
    """Several processes without a rendezvous train side by side, each on its own. That may be meant, so it is no error."""
    with suppress(UsageError):  # nothing is taken from it
        task = Task.find(environment)
        if task is not None and task.rank == 0 and (task.world_size or 1) > 1:
            log.warning(
                "%s has started %d of these processes, and each is a world of its own: there is no rendezvous at which they could meet. "
                "If they are to train together start `shardnet rendezvous` and set SHARDNET_RENDEZVOUS to its host:port",
                *(task.scheduler, task.world_size),
            )
