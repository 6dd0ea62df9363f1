"""Gathering optimizer state from all ranks."""

from collections.abc import Mapping
from typing import Any

import torch

from shardnet.fsdp.communicators import Communicators
from shardnet.zero.bucket import Bucket
from shardnet.zero.codec import State, decode, encode
from shardnet.zero.split import Split
from shardnet.zero.state import join

Tensor = torch.Tensor


def consolidate(
    bucket: Bucket, number: Mapping[Tensor, int], local: Mapping[int, State], split: Split, comms: Communicators
) -> dict[int, State]:
    """The whole state of a bucket's parameters, by their numbers; `local` has this rank's. A collective.

    A parameter that has no state on any rank is left out.
    """
    ranks = _exchange(
        {number[parameter]: local[number[parameter]] for parameter in bucket.parameters if number[parameter] in local}, bucket.label, comms
    )
    slices = [bucket.slices(rank) for rank in range(len(ranks))]
    whole = {}
    for parameter in bucket.parameters:
        index = number[parameter]
        parts = [(slices[rank][parameter], state[index]) for rank, state in enumerate(ranks) if index in state]
        if parts:
            whole[index] = join(parts, split)
    return whole


def _exchange(mine: dict[int, State], label: str, comms: Communicators) -> list[dict[int, Any]]:
    """Everyone's states of some parameters, by rank."""
    header, payload = encode(mine)
    label = f"{label} (state)"
    sizes = comms.wait(comms.everyone.all_gather(torch.tensor([[header.numel(), payload.numel()]], device="cpu"), label=label), label)
    headers = _gather(header, sizes[:, 0].tolist(), label, comms)
    payloads = _gather(payload, sizes[:, 1].tolist(), label, comms)
    return [decode(header, payload) for header, payload in zip(headers, payloads, strict=True)]


def _gather(mine: Tensor, sizes: list[int], label: str, comms: Communicators) -> list[Tensor]:
    return list(comms.wait(comms.everyone.all_gather(mine, sizes=sizes, label=label), label).split_with_sizes(sizes))
