"""Stands in for Slurm's srun: `srun.py [--option...] COMMAND...` starts a step's tasks, one per node, and ends with their worst status.

All nodes are this machine, so SHARDNET_NODE tells each task that it is on another node, as the host's name would.
"""

import os
import subprocess
import sys

from tests.training.scheduled import slurm


def main() -> int:
    command = sys.argv[1:]
    while command[0].startswith("--"):
        command.pop(0)
    nodes = int(os.environ["SLURM_NNODES"])
    last_first = reversed(range(nodes))  # so that ranks do not follow from the order of arrival alone
    tasks = [subprocess.Popen(command, env=os.environ | slurm(rank, nodes, 1) | {"SHARDNET_NODE": f"node{rank}"}) for rank in last_first]
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
