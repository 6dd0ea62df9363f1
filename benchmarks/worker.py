"""A worker process: `python -m benchmarks.worker SESSION DIRECTORY`, started by launching.py.

SESSION    what to measure, as JSON (plan.py)
DIRECTORY  that the ranks of this session share
"""

import signal
import sys
from pathlib import Path

import shardnet
from benchmarks.plan import from_json


async def main() -> None:
    from benchmarks.measuring import measure

    await measure(from_json(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the long imports ends this process without a traceback; run() takes over
    shardnet.run(main)
