"""`python -m shardnet` is the `shardnet` command, for where the console script is not on the path."""

import sys

from shardnet.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
