"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("shardnet")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


VERSION = _installed()
