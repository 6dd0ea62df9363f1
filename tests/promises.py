"""How long something may take in a test. `make faults` runs nothing else at the same time, and holds shardnet to the letter of its promises
in seconds. The ordinary suite shares its processors with itself and with other programs, so it allows more time: but not so much that code
which waits for a timeout, for the end of a peer's silence (1.5 x suspect_s) or for the end of its data (drain_s) would pass as prompt."""

import os

TO_THE_LETTER = bool(os.environ.get("SHARDNET_TO_THE_LETTER"))


def within_s(promised_s: float, room: float = 1.9) -> float:
    return promised_s if TO_THE_LETTER else room * promised_s
