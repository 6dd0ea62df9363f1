"""Who writes what. Pure: every rank works out the same from what all ranks hold."""

from collections.abc import Sequence

from shardnet.state import Span


def writers(held: Sequence[Sequence[Span]]) -> dict[Span, int]:
    """The rank that writes each span, of those that hold it, so that all have about as much to write. `held` is by rank."""
    holders: dict[Span, list[int]] = {}
    for rank, spans in enumerate(held):
        for span in spans:
            holders.setdefault(span, []).append(rank)
    loads = [0] * len(held)
    duties = {}
    for span in sorted(holders, key=lambda span: (len(holders[span]), -span.numel, span.name, span.start)):  # who has no choice first
        rank = min(holders[span], key=lambda rank: (loads[rank], rank))
        duties[span] = rank
        loads[rank] += span.numel
    return duties
