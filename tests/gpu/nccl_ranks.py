"""Ranks that NCCL connects, on however few GPUs there are.

NCCL accepts one rank per GPU of a machine. If there are more ranks than GPUs, each rank claims to be on a machine of its own: NCCL then
goes over loopback, as between machines, and the GPU runs all ranks' kernels in turn. That is slow, but otherwise as between GPUs.
"""

import os

import torch

import shardnet
from shardnet.backend.hybrid_backend import HybridBackend, with_engine
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.config import NodeEngine


async def over_nccl(cluster: shardnet.Cluster) -> shardnet.Cluster:
    """The same ranks, with NCCL inside their nodes. Each is a process, and calls this before it uses the GPU."""
    gpus = torch.cuda.device_count()
    if gpus < cluster.world_size:
        os.environ["NCCL_HOSTID"] = f"rank {cluster.rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    assert isinstance(cluster.backend, MeshBackend)
    return shardnet.Cluster(await with_engine(cluster.backend, NodeEngine.NCCL, cluster.rank % gpus), cluster.topology)


def hybrid(cluster: shardnet.Cluster) -> HybridBackend:
    assert isinstance(cluster.backend, HybridBackend)
    return cluster.backend
