"""Which rank writes what: each span is written once, by a rank that holds it, and no rank writes much more than another."""

import random

import pytest

from shardnet.checkpoint.duties import writers
from shardnet.state import Span


def test_what_one_rank_holds_it_writes() -> None:
    spans = [[Span("a", 0, 5)], [Span("a", 5, 9), Span("b", 0, 3)], []]
    assert writers(spans) == {Span("a", 0, 5): 0, Span("a", 5, 9): 1, Span("b", 0, 3): 1}


@pytest.mark.parametrize("seed", range(5))
def test_what_all_hold_is_shared_out(seed: int) -> None:
    rng = random.Random(seed)
    spans = [Span(f"p{number}", 0, rng.randrange(1, 1000)) for number in range(50)]
    own = [Span("own", 0, 2000)]  # of rank 0, which therefore gets less of the rest
    duties = writers([spans + own, spans, spans])
    assert duties.keys() == {*spans, *own}
    assert duties[own[0]] == 0
    loads = [sum(span.numel for span, rank in duties.items() if rank == each) for each in range(3)]
    assert max(loads) - min(loads) <= max(span.numel for span in spans)
