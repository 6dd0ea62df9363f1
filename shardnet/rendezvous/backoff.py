"""How long to wait before trying again."""

import random
from collections.abc import Iterator

FIRST_S = 0.1
MOST_S = 2.0  # a worker that waits for its rendezvous starts at most this late


def delays(seed: int | None = None, *, most_s: float = MOST_S) -> Iterator[float]:
    """Endless delays in seconds: each is random between half of a limit and the limit, which doubles each time, up to `most_s`.

    Without the randomness, workers that lost the same rendezvous would all return in the same instant.
    """
    source = random.Random(seed)
    delay = FIRST_S
    while True:
        yield source.uniform(delay / 2, delay)
        delay = min(2 * delay, most_s)
