"""Finds the programs that come with shardnet but are not part of the package."""

from pathlib import Path

from shardnet.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[2]  # the directory that holds `shardnet/`


def find(path: str) -> Path:
    """The file `path` of the checkout or, if shardnet was installed elsewhere, of the current directory.

    Raises UsageError saying how to get it.
    """
    for home in (CHECKOUT, Path.cwd()):
        if (home / path).is_file():
            return home / path
    raise UsageError(
        f"{path} is neither beside the package ({CHECKOUT}) nor in this directory: it comes with shardnet's sources, not with the "
        "installed package; clone the project and run this command there"
    )
