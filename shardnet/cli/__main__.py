"""The `shardnet` command; also `python -m shardnet`."""

import signal
import sys


def main() -> int:
    """Run this process's command line; returns the exit status. A Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        from shardnet.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
