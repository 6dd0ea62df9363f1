"""Which rank writes what. Pure: every rank works out the same from what all ranks hold."""

from collections.abc import Sequence

from shardnet.state import Span


def writers(held: Sequence[Sequence[Span]]) -> dict[Span, int]:
    """For each span, one of the ranks that hold it to write it, chosen so that all ranks write about equally much. `held` is by rank."""
    holders: dict[Span, list[int]] = {}
    for rank, spans in enumerate(held):
        for span in spans:
            holders.setdefault(span, []).append(rank)
    loads = [0] * len(held)
    duties = {}
    for span in sorted(holders, key=lambda span: (len(holders[span]), -span.numel, span.name, span.start)):  # fewest holders first
        rank = min(holders[span], key=lambda rank: (loads[rank], rank))
        duties[span] = rank
        loads[rank] += span.numel
    return duties
