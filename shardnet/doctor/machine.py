"""This machine: versions, processors, memory, files."""

import os
import platform
import resource
from collections.abc import Iterator
from importlib.metadata import version

import psutil
import torch

from shardnet.address import Address
from shardnet.backend.torch_source import check_engine
from shardnet.config import Limits
from shardnet.doctor.finding import Finding, ok, problem, warning
from shardnet.errors import AddressError, ListenError, UsageError
from shardnet.settings import Settings
from shardnet.transport.listening import check_free
from shardnet.transport.shared_memory import memfd
from shardnet.version import VERSION

FILES = 4096  # a worker has two sockets for each peer, and as many again while an epoch follows another one
_GIB = 2**30


async def about_machine(listen: str) -> list[Finding]:
    """`listen` is the host on which workers should listen; empty: they find one."""
    found = [*_versions(), _processors(), _files(), _shared_memory(), *_accelerators(), _settings()]
    if listen:
        found.append(await _listening(listen))
    return found


def _versions() -> Iterator[Finding]:
    names = ("torch", "grpcio", "numpy")
    of_these = ", ".join(f"{name} {version(name)}" for name in names)
    yield ok("versions", f"shardnet {VERSION}, Python {platform.python_version()}, {of_these}, Linux {platform.release()}")


def _processors() -> Finding:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    return ok("processors", f"{cores} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB of memory free")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"a process may have {'any number' if soft == resource.RLIM_INFINITY else soft} open at once"
    if soft >= FILES or soft == resource.RLIM_INFINITY:
        return ok("files", what)
    more = "ulimit -n 65536" if hard == resource.RLIM_INFINITY or hard >= FILES else "LimitNOFILE= of the service, or limits.conf"
    return warning("files", what, f"a world of more than {soft // 4} workers needs a higher limit: {more}")


def _shared_memory() -> Finding:
    try:
        os.close(memfd.allocate("shardnet-doctor", Limits().window_bytes))
    except OSError as error:
        return warning(
            "shared memory",
            f"none can be allocated: {error}",
            "workers of this machine send each other all data over gRPC; a container may need a newer kernel, or more memory",
        )
    return ok("shared memory", "workers of this machine can pass each other data through it")


def _accelerators() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        yield ok("accelerators", names)
    else:
        yield ok("accelerators", "torch can use none: models run on the CPU")


def _settings() -> Finding:
    """The environment, as `connect()` reads it."""
    misspelt = dict(Settings.misspelt(os.environ))
    try:
        check_engine(Settings.from_environment().node_engine)
    except (UsageError, AddressError) as error:
        return problem("settings", str(error))
    if misspelt:
        return warning(
            "settings", f"nothing reads {', '.join(misspelt)} in the environment", f"did you mean {', '.join(misspelt.values())}?"
        )
    names = sorted(name for name in os.environ if name.startswith("SHARDNET_"))
    return ok("settings", f"from the environment: {', '.join(names)}" if names else "none in the environment")


async def _listening(listen: str) -> Finding:
    try:
        await check_free(Address(listen, 0))
    except ListenError as error:
        return problem("listening", str(error))
    return ok("listening", f"workers can listen on {listen}")
