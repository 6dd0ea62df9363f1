"""Run as a module, `python -m shardnet.testing.forking MODULE...`: imports modules, and forks processes that call functions.

What such a process shall do is a function as "module:name" and its arguments, of which the last ones are numbers of descriptors. What it
returns is the exit status.
"""

import os
import pkgutil
import sys

from shardnet.forking.server import preload, serve


def main() -> int:
    preload([*sys.argv[1:], "torch._dynamo"])  # which the first optimizer imports
    forked = serve()
    if forked is None:
        return 0
    function, *arguments = forked.task
    status: int = pkgutil.resolve_name(function)(*arguments, *map(str, forked.descriptors))
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: what is frozen is never collected, which some libraries complain of when Python takes itself down
