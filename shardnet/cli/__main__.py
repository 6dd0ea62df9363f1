"""`python -m shardnet.cli`: the same as `shardnet`, for where the console script is not on the path."""

import sys

from shardnet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
