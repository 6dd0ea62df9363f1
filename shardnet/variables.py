"""Environment variables as values, read in the same way by the commands and by `connect`."""

import difflib
from collections.abc import Collection, Iterator, Mapping

from shardnet.errors import UsageError


def flag(environment: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """The value of a variable that is 0 or 1; an empty one counts as not set. Raises UsageError for anything else."""
    text = environment.get(name, "") or str(int(default))
    if text not in ("0", "1"):  # "no" would otherwise mean one thing to its writer and another to us
        raise UsageError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def misspelt(environment: Mapping[str, str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Variables that shardnet does not read but that look like a `known` one, each with that one.

    Variables that begin with a known name are left alone: Kubernetes gives each container SHARDNET_RENDEZVOUS_PORT if there is a
    service named shardnet-rendezvous.
    """
    for name in sorted(environment.keys() - known):
        prefix, _, rest = name.upper().partition("_")  # a common prefix alone does not make names similar
        if prefix != "SHARDNET" or any(name.startswith(f"{each}_") for each in known):
            continue
        if found := difflib.get_close_matches(rest, [each.removeprefix("SHARDNET_") for each in known], n=1, cutoff=0.8):
            yield name, f"SHARDNET_{found[0]}"
