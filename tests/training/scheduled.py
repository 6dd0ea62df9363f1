"""Environments as schedulers make them, and a process that joins in one.

As `srun` makes them: SLURM_JOB_ID and SLURM_NTASKS belong to the allocation; its shells and batch scripts have them, too, with
SLURM_PROCID=0. Variables with STEP in their names belong to the step.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import shardnet
from shardnet.config import Timeouts

Environment = dict[str, str]
_OTHERS = re.compile(
    r"(SHARDNET|SLURM|OMPI|PMIX?|MPI|TORCHELASTIC|ROLE)_.*|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX"
)


def without_schedulers(environment: Mapping[str, str]) -> Environment:
    """The environment of an ordinary shell."""
    return {name: value for name, value in environment.items() if not _OTHERS.fullmatch(name)}


def torchrun(rank: int, world_size: int, per_node: int, run_id: str = "none") -> Environment:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def allocation(tasks: int, nodes: int) -> Environment:
    """The environment of a batch script."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def slurm(rank: int, world_size: int, per_node: int, step: int = 0) -> Environment:
    """The environment of a task of srun, with tasks dealt out node by node."""
    return allocation(world_size, world_size // per_node) | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NUM_NODES": str(world_size // per_node),
        "SLURM_STEP_NODELIST": f"node[0-{world_size // per_node - 1}]",
    }


def open_mpi(rank: int, world_size: int, per_node: int) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % per_node),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
    }


def mpiexec(rank: int, world_size: int, per_node: int) -> Environment:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(world_size), "MPI_LOCALRANKID": str(rank % per_node)}


def join(environment: str, answer: str) -> int:
    """In a new process: join with this environment (a JSON object), and write down its rank and place; return the exit status."""
    wanted: Environment = json.loads(environment)
    os.environ.clear()
    os.environ.update(wanted)
    found: list[int] = []
    shardnet.run(lambda: _join(found))
    Path(answer).write_text(json.dumps(found))
    return 0


async def _join(found: list[int]) -> None:
    async with shardnet.connect(timeouts=Timeouts.for_tests()) as cluster:
        await cluster.backend.barrier()
        me = cluster.topology.me
        found += [me.rank, cluster.world_size, me.node_group, me.local_rank]
