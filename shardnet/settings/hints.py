"""`Hints`: what a scheduler says about a worker, used unless something with precedence says otherwise.

[Note: who has the say] Arguments of `connect()` come first, then SHARDNET_* variables, then the scheduler that has started this process
([Note: schedulers] in shardnet/scheduler.py). Without a rendezvous a process is a world of one, whatever a scheduler says. If the user
sets `local_rank` or `wished_rank`, neither number comes from the scheduler. With a folder of certificates the scheduler does not name the
job, because a certificate is for a certain job. The scheduler never names the node: the host's own identity is right under all
schedulers, and nodes of a scheduler may share a host.
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
    """Defaults of some settings; where the scheduler does not count, the defaults without a scheduler.

    world_size_from  the variable that gave the world size, for messages
    """

    world_size: int = 1
    world_size_from: str = "SHARDNET_WORLD_SIZE"
    local_rank: int = 0
    wished_rank: int = -1
    job: str = "default"

    @classmethod
    def find(cls, environment: Mapping[str, str], given: Mapping[str, object], world_size: int) -> Self:
        """See [Note: who has the say]. `given` are arguments of `connect()`; `world_size` is the largest number of workers according to
        them or to SHARDNET_* variables, 0 if they do not say.

        Raises UsageError if the scheduler's values are needed and make no sense, or are incomplete.
        """
        if not _said("rendezvous", environment, given):
            _warn_if_alone(environment)
            return cls()
        task = Task.find(environment, world_size or None)
        if task is None:
            return cls()
        if task.world_size is None and not world_size:
            raise UsageError(
                f"{task.scheduler} has started this process as number {task.rank}, but does not say how many there are; set "
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
    """Whether an argument or a variable of ours sets it; an empty one does not."""
    return given[name] != "" if name in given else bool(environment.get(f"SHARDNET_{name.upper()}"))


def _warn_if_alone(environment: Mapping[str, str]) -> None:
    """Warn if several processes without a rendezvous train side by side, each on its own. That may be intended, so it is not an error."""
    with suppress(UsageError):  # the scheduler's values are not used here
        task = Task.find(environment)
        if task is not None and task.rank == 0 and (task.world_size or 1) > 1:
            log.warning(
                "%s has started %d of these processes, and each trains alone, because they have no rendezvous; to let them train together, "
                "start `shardnet rendezvous` and set SHARDNET_RENDEZVOUS to its host:port",
                *(task.scheduler, task.world_size),
            )
