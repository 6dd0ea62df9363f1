"""Environment variables as values: what is read alike by the commands and by `connect`."""

from collections.abc import Mapping

from shardnet.errors import UsageError


def flag(environment: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """0 or 1; an empty variable is one that is not set. Raises UsageError for anything else."""
    text = environment.get(name, "") or str(int(default))
    if text not in ("0", "1"):  # "no" would otherwise mean one thing to its writer and another to us
        raise UsageError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"
