"""Random programs of collectives: their steps, inputs and expected results, and running them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.backend import Backend, NodeBuffer, Pending, ReduceOp
from shardnet.testing import reference, same_bits

PATIENCE_S = 20.0
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
OPS = (
    *("all_reduce", "all_reduce_pieces", "broadcast", "broadcast_on_node", "all_gather", "gather_on_node"),
    *("reduce_scatter", "reduce_scatter_pieces", "all_to_all", "uneven", "send", "barrier"),
)
GROUPS: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (0, 2), (1, 2, 3), (3,))


@dataclass(frozen=True)
class Step:
    """One collective of a group; `cuts` says how many rows go from each member to each other."""

    members: tuple[int, ...]
    op: str
    dtype: torch.dtype
    rows: int
    width: int
    reduce: ReduceOp
    root: int
    cuts: tuple[tuple[int, ...], ...]


def reductions(dtype: torch.dtype) -> list[ReduceOp]:
    return [op for op in ReduceOp if op.is_defined_for(dtype)]


def random_step(rng: random.Random, groups: Sequence[tuple[int, ...]] = GROUPS, *, rows: int) -> Step:
    """A step drawn with a seeded generator rather than by hypothesis, for runs that are too long to be shrunk."""
    members = rng.choice(groups)
    ranks = range(len(members))
    dtype = rng.choice(DTYPES)
    reduce = rng.choice(reductions(dtype))
    size = rng.choice((0, 1, 10, rows // 10, rows))
    cuts = tuple(tuple(rng.randint(0, size // len(members)) for _ in ranks) for _ in ranks)
    return Step(members, rng.choice(OPS), dtype, rng.randint(0, size), rng.randint(1, 3), reduce, rng.choice(ranks), cuts)


def inputs_of(step: Step, salt: int) -> list[torch.Tensor]:
    """Each member's input: small whole numbers, whose sums are exact in any order."""
    ranks = len(step.members)
    rows = step.rows * (ranks if step.op in ("reduce_scatter", "reduce_scatter_pieces", "all_to_all") else 1)
    tensors = []
    for rank in range(ranks):
        mine = sum(step.cuts[rank]) if step.op == "uneven" else rows
        values = (torch.arange(mine * step.width) * 5 + rank * 3 + salt) % (2 if step.dtype is torch.bool else 9)
        tensors.append(values.to(step.dtype).reshape(mine, step.width))
    return tensors


def expected(step: Step, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    match step.op:
        case "all_reduce":
            return [*reference.all_reduce(inputs, step.reduce)]
        case "broadcast" | "broadcast_on_node":
            return [*reference.broadcast(inputs, step.root)]
        case "all_gather" | "gather_on_node":
            return [*reference.all_gather(inputs)]
        case "reduce_scatter":
            return [*reference.reduce_scatter(inputs, step.reduce)]
        case "all_reduce_pieces":
            return [each.reshape(-1) for each in reference.all_reduce(inputs, step.reduce)]
        case "reduce_scatter_pieces":
            return [each.reshape(-1) for each in reference.reduce_scatter(inputs, step.reduce)]
        case "all_to_all":
            return [*reference.all_to_all(inputs)]
        case "uneven":
            return [*reference.all_to_all(inputs, step.cuts)]
        case "send":  # each member sends to the next one
            return [inputs[rank - 1] if len(inputs) > 1 else None for rank in range(len(inputs))]
        case _:
            return [None for _ in inputs]


def start(step: Step, group: Backend, mine: torch.Tensor) -> list[Pending[Any]]:
    """The handles of a step on one rank; the last one gives its result."""
    ranks, rank = group.world_size, group.rank
    match step.op:
        case "all_reduce" | "reduce_scatter":
            return [getattr(group, step.op)(mine, step.reduce)]
        case "all_reduce_pieces" | "reduce_scatter_pieces":  # each rank cuts them in other places, into rows or not
            pieces = torch.split(mine if rank % 2 else mine.reshape(-1), step.cuts[rank][0] + 1)
            return [getattr(group, step.op)(pieces, step.reduce)]
        case "broadcast":
            return [group.broadcast(mine, step.root)]
        case "all_gather" | "all_to_all":
            return [getattr(group, step.op)(mine)]
        case "broadcast_on_node":
            return [group.broadcast_on_node(mine.clone(), step.root).map(_taken)]
        case "gather_on_node":
            return [group.all_gather_on_node(mine).map(_taken)]
        case "uneven":
            return [group.all_to_all(mine, send_sizes=step.cuts[rank], recv_sizes=[cut[rank] for cut in step.cuts])]
        case "send" if ranks > 1:
            return [group.send(mine, (rank + 1) % ranks), group.recv(torch.empty_like(mine), (rank - 1) % ranks)]
        case _:
            return [group.barrier()]


def _taken(buffer: NodeBuffer) -> torch.Tensor:
    copy = buffer.tensor.clone()
    buffer.release()
    return copy


class Runner:
    """Four ranks and their groups, for many programs."""

    def __init__(self, ranks: Sequence[Backend], *, passing: bool = False) -> None:
        """`passing`: each step has groups of its own, to which nobody holds a reference once the step is under way."""
        self._ranks = ranks
        self._groups = {} if passing else {(members, rank): ranks[rank].subgroup(members) for members in GROUPS for rank in members}

    def run(self, program: list[Step], seed: int) -> None:
        """Start all steps, rank by rank, then wait for them in a random order."""
        data = [inputs_of(step, number) for number, step in enumerate(program)]
        started = []
        for rank in random.Random(seed).sample(range(4), 4):
            for number, step in enumerate(program):
                if rank in step.members:
                    local = step.members.index(rank)
                    group = self._groups.get((step.members, rank)) or self._ranks[rank].subgroup(step.members)
                    handles = start(step, group, data[number][local])
                    started.append((number, local, handles))
        random.Random(seed).shuffle(started)
        for number, local, handles in started:
            results = [handle.wait(PATIENCE_S) for handle in handles]
            wanted = expected(program[number], data[number])[local]
            if wanted is not None:
                assert same_bits(results[-1], wanted), f"step {number} on rank {local} of {program[number].members}"
