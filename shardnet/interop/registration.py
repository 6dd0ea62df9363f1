"""How torch learns that there is a backend called "shardnet".

torch calls `register` at the end of its own import: it is an entry point of the group `torch.backends` (pyproject.toml). So it imports
nothing that torch has not; the rest comes with the first process group.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from shardnet.interop.process_group import ShardnetProcessGroup

NAME = "shardnet"
DEVICES = ["cpu"]


def register() -> None:
    """Make the name known. Safe to call again. Does nothing where torch was built without its distributed package."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, _: object) -> "ShardnetProcessGroup":
    """What torch calls on each member of a new group."""
    from shardnet.interop.process_group import create

    return create(options)
