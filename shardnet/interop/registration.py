"""How torch learns that there is a backend called "shardnet".

torch calls `register` at the end of its own import: it is an entry point of the group `torch.backends` (pyproject.toml). So this module
imports nothing except torch; everything else is imported with the first process group.
"""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shardnet.interop.mixed import MixedProcessGroup
    from shardnet.interop.process_group import ShardnetProcessGroup

NAME = "shardnet"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make the name known. Safe to call again. Does nothing if torch was built without its distributed package."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        register_rendezvous_handler(NAME, _rendezvous)  # type: ignore[no-untyped-call]
        # torch would attach its flight recorder to each group that has devices. The recorder asks the C++ part of the group for a name,
        # which a group in Python cannot give, and init_process_group would fail. shardnet records its collectives itself.
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(NAME)


def _create(options: Any, others_options: Any) -> "ShardnetProcessGroup | MixedProcessGroup":
    """torch calls this on each member of a new group."""
    from shardnet.interop import mixed, process_group

    making = _making()
    config = making.get("backend_config")
    if config is None or set(config.get_device_backend_map().values()) == {NAME}:
        return process_group.create(options)
    return mixed.create(options, others_options, making["pg"], config, str(making.get("group_desc")))


def _making() -> dict[str, Any]:
    """The local variables of torch's function that makes a group. torch does not tell a backend about the others, so this looks there."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _rendezvous(url: str, **options: Any) -> "Iterator[tuple[Store, int, int]]":
    """torch calls this for `init_method="shardnet://"`."""
    from shardnet.interop.rendezvous import rendezvous

    return rendezvous(url, **options)
