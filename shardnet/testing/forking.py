"""Run as a module, `python -m shardnet.testing.forking MODULE...`: imports modules, and forks processes that call functions.

The task of such a process is a function as "module:name" and its arguments, of which the last ones are numbers of descriptors. The
function's result is the exit status.
"""

import os
import pkgutil
import sys

from shardnet.forking.server import preload, serve


def main() -> int:
    preload([*sys.argv[1:], "torch._dynamo"])  # the first optimizer imports it
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
    os._exit(status)  # at once: frozen objects are never collected, and some libraries complain about that when Python shuts down
