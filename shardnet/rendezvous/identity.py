"""Names for this host and for this start of a worker."""

import socket
import uuid
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_identity(override: str = "") -> str:
    """A name for this host, the same for all processes on it and for no others; `override` wins if it is given.

    The host name alone is not enough (cloned machines share it), nor is the boot id (containers of one host share it,
    but not its memory). The name groups ranks; whether two of them can share memory is proved by trying, not by this.
    """
    return override or f"{socket.gethostname()}/{_boot_id()}"


def new_incarnation() -> str:
    """An identity for this start of a worker."""
    return uuid.uuid4().hex


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the network card's address tells hosts apart
        return f"{uuid.getnode():012x}"
