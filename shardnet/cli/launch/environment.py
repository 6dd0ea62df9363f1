"""The environment variables by which a launcher tells a worker everything: the whole contract between the two.

SHARDNET_RENDEZVOUS        host:port of the rendezvous
SHARDNET_JOB               id of the job there
SHARDNET_WORLD_SIZE        workers on all nodes; the most that the job runs with, and unless it is elastic, the least
SHARDNET_ELASTIC           only if the job is elastic: 1
SHARDNET_MIN_WORLD_SIZE    only if the job is elastic: the smallest number of workers with which it goes on
SHARDNET_LOCAL_RANK        0-based number of the worker on this machine
SHARDNET_LOCAL_WORLD_SIZE  workers on this machine; a worker with it ignores schedulers ([Note: schedulers] in shardnet/scheduler.py)
SHARDNET_WISHED_RANK       only if this machine's number is known: the rank that follows from it
SHARDNET_REPLACEMENT       only for a worker that replaces one that has failed: 1
SHARDNET_REPORT_FILE       file to which the worker appends one line, "address rank world_size", whenever these have changed
SHARDNET_NODE              only if given: this machine's name
SHARDNET_LISTEN            only if given: host to listen on
SHARDNET_INSECURE          1 allows unencrypted connections to other machines; otherwise 0
SHARDNET_CERTS             folder with this machine's certificate, or empty
SHARDNET_TOKEN             join token, or empty
SHARDNET_TOKEN_FILE        empty: the launcher has read that file, and the token is in SHARDNET_TOKEN
SHARDNET_TRACE             only if given: path of the trace
OMP_NUM_THREADS            this worker's share of the cores, unless the user set it
GLIBC_TUNABLES             keeps malloc from caching small freed blocks (see `_NOTHING_ASIDE`), unless the user set it
"""

import os
from collections.abc import Mapping

from shardnet.cli.launch.job import Job

# glibc keeps small freed blocks in a cache by thread and size (tcache), and counts them as used until it needs one of that size. So large
# freed memory beside them stays in pieces, which are too small for the next step: for some forty steps each step takes more memory from
# the system, page by page, until a process has half as much again as it would need.
_NOTHING_ASIDE = "glibc.malloc.mxfast=0:glibc.malloc.tcache_max=0"


def common_environment(job: Job, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that all workers share: `inherited` (default: this process's own), and variables that libraries read when they are
    loaded."""
    environment = dict(os.environ if inherited is None else inherited)
    # Without a limit every worker starts one thread per core, and on a full machine the threads mostly wait for each other.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // job.nproc)))
    environment.setdefault("GLIBC_TUNABLES", _NOTHING_ASIDE)
    return environment


def worker_environment(job: Job, local_rank: int, rendezvous: str, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one worker: the common one, and the launcher's variables for it."""
    environment = common_environment(job, inherited) | {
        "SHARDNET_RENDEZVOUS": rendezvous,
        "SHARDNET_JOB": job.name,
        "SHARDNET_WORLD_SIZE": str(job.world_size),
        "SHARDNET_LOCAL_RANK": str(local_rank),
        "SHARDNET_LOCAL_WORLD_SIZE": str(job.nproc),
    }
    if job.node_rank is not None:
        environment["SHARDNET_WISHED_RANK"] = str(job.node_rank * job.nproc + local_rank)
    if job.elastic:
        environment |= {"SHARDNET_ELASTIC": "1", "SHARDNET_MIN_WORLD_SIZE": str(job.least_workers)}
    return environment | job.protection.environment | _choices(job)


def _choices(job: Job) -> dict[str, str]:
    """The variables that exist only if the user asked for them."""
    choices = {
        "SHARDNET_NODE": job.node,
        "SHARDNET_LISTEN": job.listen,
        "SHARDNET_TRACE": job.trace,
    }
    return {name: value for name, value in choices.items() if value is not None}


def available_cores() -> int:
    """Cores that this process may use, which in a container are often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
