"""Where the programs are that come with shardnet but are not part of the package."""

from pathlib import Path

from shardnet.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[2]  # the directory that holds `shardnet/`


def find(path: str) -> Path:
    """The file or directory `path` of the checkout; raises UsageError saying how to get it."""
    found = CHECKOUT / path
    if not found.exists():
        raise UsageError(
            f"{path} is not here: it comes with shardnet's sources, and this is an installed package ({CHECKOUT}). "
            "Clone the project and run this command there"
        )
    return found
